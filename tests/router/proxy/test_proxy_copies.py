"""A whole router that has hot prefixes copied in the shared store."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from engines.store import VllmLayout
from indexer.hashing import pack_tokens
from router.serve import run
from router.settings import Settings
from router.store import copies as store_copies
from router.store.copies import StoreCopies
from router.store.mooncake_client import ClientFailed
from router.store.spec import StoreSpec
from tests.fakes.mooncake_library import Place, place_in
from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer
from tests.fakes.store_master import PLAIN, Master, serving
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

SIZE = 16
LAYOUT = VllmLayout(model="tiny", block_size=SIZE)
HOT = list(range(1, 4 * SIZE + 1))
KEYS = [key for digest in LAYOUT.hashes(pack_tokens(HOT), PLAIN) or [] for key in LAYOUT.keys(digest)]
SEGMENTS = {
    "segments": [
        {"segment_name": f"name-{host}", "te_endpoint": f"{host}:1", "size_bytes": 1000, "allocator_used_bytes": 0}
        for host in ("host-a", "host-b")
    ]
}


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    async with serving(LAYOUT) as found:
        found.segments_text = json.dumps(SEGMENTS)
        found.owners = {key: ["host-a:1"] for key in KEYS}
        yield found


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(store_copies, "INTERVAL", 3600.0)
    found = place_in(tmp_path, monkeypatch)
    found.write()
    return found


class Copying(NamedTuple):
    router: RunningRouter
    copies: StoreCopies

    def counted(self, outcome: str) -> float:
        return self.router.total("router_store_copies_total", outcome=outcome)


async def until_told(dialogue: Dialogue) -> None:
    await dialogue.go_on.wait()
    await answer()(dialogue)


@asynccontextmanager
async def busy(a: ScriptedWorker, b: ScriptedWorker, master: Master, copy: int = 100) -> AsyncIterator[Copying]:
    """Worker a has a request, b has none; a prefix of four blocks is hot."""
    store = StoreSpec(url=master.url, block_size=SIZE, budget_ms=10_000.0, copy=copy, rpc="127.0.0.1:1")
    async with running(a, b, router_mode="kv", store=store) as router, router.client() as client:
        fleet = router.app._fleet
        for worker in (a, b):
            known = fleet.workers[worker.name]
            fleet.restate(known, msgspec.structs.replace(known.spec, host=f"host-{worker.name}"))
        for number in range(9):
            body = {"model": "tiny", "prompt": [*HOT, *[1000 + number] * SIZE]}
            assert (await client.ask(post(body=json.dumps(body).encode()))).status == 200
        await router.at_rest()
        a.then(until_told)
        async with router.client() as other:
            other.send(post("/v1/completions", b'{"model":"tiny","prompt":[1]}', b"x-router-target-worker: a"))
            await until(lambda: router.total("router_load_requests", worker="a") == 1)
            assert router.app._copies
            yield Copying(router, router.app._copies)
            a.go_on.set()


async def test_hot_prefixes_of_a_busy_host_are_copied(
    a: ScriptedWorker, b: ScriptedWorker, master: Master, library: Place
) -> None:
    master.put(pack_tokens(HOT), 4)
    async with busy(a, b, master) as copying:
        assert await copying.copies.spread() == 4
        assert library.calls[1:] == [("copy", [key, ["name-host-b"]]) for key in KEYS]
        assert (copying.counted("asked"), copying.counted("failed")) == (4, 0)
        master.owners = {key: ["host-a:1", "host-b:1"] for key in KEYS}
        assert await copying.copies.spread() == 0, "they have two by now"


@pytest.mark.parametrize(("copy", "there", "copied"), [(4, 4, 4), (3, 4, 0), (100, 3, 0), (100, 0, 0)])
async def test_whole_prefixes_within_the_budget(
    a: ScriptedWorker, b: ScriptedWorker, master: Master, library: Place, copy: int, there: int, copied: int
) -> None:
    """One that is longer, or not all there, is left alone."""
    master.put(pack_tokens(HOT), there)
    async with busy(a, b, master, copy) as copying:
        assert await copying.copies.spread() == copied


async def test_while_nobody_is_busy_nothing_is_asked(
    a: ScriptedWorker, b: ScriptedWorker, master: Master, library: Place
) -> None:
    master.put(pack_tokens(HOT), 4)
    async with busy(a, b, master) as copying:
        a.go_on.set()
        await copying.router.at_rest()
        assert await copying.copies.spread() == 0
        assert not library.calls


async def test_a_failure_is_said_once(
    a: ScriptedWorker, b: ScriptedWorker, master: Master, library: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with busy(a, b, master) as copying:
        for reason in ("first", "second"):
            copying.copies._fail(ClientFailed(reason))
        assert [record.levelno for record in caplog.records if "copied" in record.message] == [logging.WARNING]
        assert copying.counted("failed") == 2


def test_without_the_library_the_router_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Settings(workers=(), store=StoreSpec(url="http://h:1", copy=1))) == 2
    assert "pip install mooncake-transfer-engine" in capsys.readouterr().err
