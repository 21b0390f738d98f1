"""A start compiles what the mode needs, and no more: all of it takes half a minute where nothing is kept. And what is
not compiled then is not needed later, when it would hold up all answers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.children import PATIENCE, ROOT

pytestmark = pytest.mark.slow

SERVED = """
import asyncio, json, sys
from engines import number_kernels
from indexer import handle_kernels, hash_kernels, kernels, lives
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until
from tests.router.proxy.running import running, session

async def serve(settings):
    async with ScriptedWorker("a") as a, running(a, load_interval=0.01, **settings) as router:
        async with session(router) as client:
            async with client.post("/v1/completions", json={"model": "tiny", "prompt": [1, 2, 3, 4, 5]}) as answer:
                assert answer.status == 200
        if "event_plane" not in settings:
            await until(lambda: router.samples("router_load_age_seconds"))

asyncio.run(serve(json.loads(sys.argv[1])))
kinds = {
    "hashes": hash_kernels.chain, "index": kernels.store, "assumptions": lives._move,
    "numbers": number_kernels.take_out, "handles": handle_kernels.store,
}
print(*(kind for kind, kernel in kinds.items() if kernel.signatures))
"""
INDEX = ["hashes", "index", "assumptions"]


@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        ({"router_mode": "kv"}, [*INDEX, "numbers", "handles"]),
        ({"router_mode": "kv", "kv_events": False}, INDEX),
        ({"router_mode": "kv", "event_plane": "nats://127.0.0.1:1"}, INDEX),
        ({"router_mode": "round-robin", "ab": "kv:1,random:1"}, [*INDEX, "numbers", "handles"]),
        ({"router_mode": "round-robin"}, []),
        ({"router_mode": "least-loaded", "max_worker_concurrency": 9}, []),
    ],
    ids=["kv", "without events", "events over a broker", "an arm", "round robin", "by load"],
)
def test_what_a_mode_compiles(settings: dict[str, Any], compiled: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SERVED, json.dumps(settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].split() == compiled
