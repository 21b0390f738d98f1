"""Our plug-in inside a real vLLM: no ZMQ socket, no polling, and the event plane still has all of it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from indexer.events import (
    EventBatch,
    LoadReport,
    ReplayRequest,
    Stored,
    decode_batch,
    decode_load,
    encode,
    unpack_hashes,
)
from indexer.hashing import chain_hashes, pack_tokens
from indexer.types import WorkerRank
from publishers.nats_plane import NatsPlane
from publishers.plane import all_events, all_loads, replay_subject
from tests.fakes.waiting import until
from tests.nats_fixture import running_nats_server

from .asking import ask, get
from .fleet import BLOCK, ENGINE_START, EVENTS_OFFSET, REPLAY_OFFSET, Engine
from .processes import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

PROMPT = list(range(100, 100 + 3 * BLOCK["vllm"]))


class Plugged:
    """A vLLM with the plug-in, and what it publishes."""

    def __init__(self, engine: Engine, plane: NatsPlane) -> None:
        self.engine = engine
        self.plane = plane
        self.batches: list[EventBatch] = []
        self.reports: list[LoadReport] = []

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.engine.worker_id, 0)

    async def complete(self) -> int:
        """Asks for a few tokens after PROMPT; the status."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        return (await asyncio.to_thread(ask, f"{self.engine.url}/v1/completions", body)).status


def stored(batches: list[EventBatch]) -> set[int]:
    events = [event for batch in batches for event in batch.events]
    return {one for event in events if isinstance(event, Stored) for one in unpack_hashes(event.hashes)}


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A PYTHONPATH that gives vLLM our package, its entry points, and the two libraries that vLLM lacks."""
    info = tmp_path / "kv_aware_router-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-aware-router\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name in ("nats", "xxhash"):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        (tmp_path / name).symlink_to(Path(found.origin).parent)
    return f"{tmp_path}{os.pathsep}{ROOT}"


@pytest_asyncio.fixture
async def plugged(installed: str, logs: Path) -> AsyncIterator[Plugged]:
    async with running_nats_server() as server:
        engine = Engine("vllm", "vllm-plugged", logs)
        engine.process._env |= {
            "PYTHONPATH": installed,
            "KV_ROUTER_NATS": server.url,
            "KV_ROUTER_WORKER_ID": engine.worker_id,
            "KV_ROUTER_NAMESPACE": "plugged",
        }
        plane = NatsPlane([server.url])
        await plane.start()
        found = Plugged(engine, plane)
        await plane.subscribe(all_events("plugged"), lambda payload: found.batches.append(decode_batch(payload)))
        await plane.subscribe(all_loads("plugged"), lambda payload: found.reports.append(decode_load(payload)))
        engine.process.start()
        try:
            await asyncio.to_thread(engine.wait_until_up)
            yield found
        finally:
            await asyncio.to_thread(engine.process.stop)
            await plane.close()


async def test_events_load_and_snapshots_come_from_inside(plugged: Plugged) -> None:
    await until(lambda: plugged.reports, timeout=ENGINE_START)
    assert await plugged.complete() == 200

    expected = set(chain_hashes(pack_tokens(PROMPT), BLOCK["vllm"], 0))
    await until(lambda: expected <= stored(plugged.batches))
    await until(lambda: plugged.reports[-1].event_id >= 0 and plugged.reports[-1].request_total_slots)
    assert {batch.rank for batch in plugged.batches} == {plugged.rank}
    report = plugged.reports[-1]
    assert report.exact
    assert report.kv_total_blocks
    assert report.num_requests_waiting == 0

    request = encode(ReplayRequest(*plugged.rank, epoch=0, event_id=0))
    snapshot = [one async for one in plugged.plane.request(replay_subject("plugged", plugged.rank), request)]
    assert expected <= stored([decode_batch(one) for one in snapshot])

    for offset in (EVENTS_OFFSET, REPLAY_OFFSET):
        port = int(plugged.engine.worker_id.rpartition(":")[2]) + offset
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), "vLLM still opens its ZMQ sockets"
    assert get(f"{plugged.engine.url}/health").status == 200
