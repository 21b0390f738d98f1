"""`python -m tests.soak.probe ROUTER WORKER`: what the router adds to a request, measured by a process of its own.

The same small request goes to a worker directly and through the router, in turn; the worker answers at once. What
the way through takes longer is the overhead. Prints a line of JSON for each interval: its p50 and p99 in milliseconds,
or nothing of them where no request came through.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import uvloop

from scripts.bench.pairs import percentile
from scripts.bench.workloads import MODEL
from tests.fakes.raw_client import RawClient, post

EVERY = 5.0
PAUSE = 0.02
"""Seconds between two pairs: 200 or so in an interval."""
_BODY = json.dumps({"model": MODEL, "prompt": list(range(64)), "max_tokens": 1}).encode()


async def probe(router: int, worker: int) -> None:
    """Until the process ends. Ports on this machine."""
    while True:
        added: list[float] = []
        end = time.monotonic() + EVERY
        try:
            async with RawClient(router) as through, RawClient(worker) as direct:
                while time.monotonic() < end:
                    added.append(await _seconds(through) - await _seconds(direct))
                    await asyncio.sleep(PAUSE)
        except (OSError, EOFError, TimeoutError) as error:
            sys.stderr.write(f"A probe failed: {error!r}\n")
            await asyncio.sleep(max(0.0, end - time.monotonic()))
        told = {f"p{share:g}": percentile(sorted(added), share / 100) * 1e3 for share in (50, 99) if added}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


async def _seconds(client: RawClient) -> float:
    began = time.perf_counter()
    answer = await client.ask(post("/v1/completions", _BODY, b"content-type: application/json"))
    if answer.status != 200:
        raise EOFError(f"answered {answer.status}: {answer.body[:200]!r}")
    return time.perf_counter() - began


if __name__ == "__main__":
    uvloop.run(probe(*(urlsplit(url).port or 80 for url in sys.argv[1:3])))
