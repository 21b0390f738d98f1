"""A stream whose engine is killed goes on from another; the client cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.children import PATIENCE, Router, Sim, wait_for
from tests.router.migration.client import Seen, seen

pytestmark = pytest.mark.slow

TOKENS = 60
BREAK_AFTER = 20
COMMON = {"model": "sim", "stream": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMMON, "prompt": "once upon a time ", "return_token_ids": True},
    "/v1/chat/completions": {**COMMON, "messages": [{"role": "user", "content": "tell me a story"}]},
}


@pytest.mark.parametrize(("path", "mode"), list(zip(REQUESTS, ("kv", "round-robin"), strict=True)))
async def test_an_engine_is_killed_within_a_stream(path: str, mode: str, logs: Path) -> None:
    with (
        Sim("--base-s", "0.01", log=logs, workers=1) as one,
        Sim("--base-s", "0.01", log=logs, workers=1) as two,
        Router(one.urls + two.urls, "--router-mode", mode, "--migration-limit", "1", log=logs) as router,
    ):
        wanted, found = await both(router, one, two, path)
        assert (found.text, found.tokens, found.errors) == (wanted.text, wanted.tokens, [])
        assert (found.roles, found.ends, found.reasons) == (wanted.roles, 1, ["length"])
        assert (found.usage, len(found.names)) == (wanted.usage, 1)
        assert router.metric("router_migrations_total", outcome="continued") == 1
        wait_for(router.is_at_rest)


async def both(router: Router, one: Sim, two: Sim, path: str) -> tuple[Seen, Seen]:
    """An engine's own stream, and the router's while the one that serves it is killed."""
    asked = REQUESTS[path]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as client:
        async with client.post(two.urls[0] + path, json=asked) as whole:
            wanted = seen(await whole.read())
        async with client.post(router.url + path, json=asked) as broken:
            got = b"".join([await broken.content.readuntil(b"\n\n") for _ in range(BREAK_AFTER)])
            serves = broken.headers["x-router-worker"]
            (one if one.ids == [serves] else two).process.kill()
            return wanted, seen(got + await broken.read())
