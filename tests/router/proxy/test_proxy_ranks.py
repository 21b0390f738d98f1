"""Data-parallel ranks of a server that has but some of an engine's, as with hybrid load balancing."""

from __future__ import annotations

import pytest

from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import Pages, ScriptedWorker
from tests.router.proxy.running import running


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ({"version": "0.33.0"}, {b"0", b"1"}),
        ({"version": "0.33.0", "rust_frontend_version": "0.1.0"}, {b"4", b"5"}),  # vLLM's front end in Rust
    ],
)
async def test_a_rank_is_named_as_the_front_end_counts(version: dict[str, str], named: set[bytes]) -> None:
    async with (
        ScriptedWorker("a", Pages(version=version, ranks=(4, 5))) as worker,
        running(worker) as router,
        router.client() as client,
    ):
        for _ in range(2):
            await client.ask(post("/v1/completions", b'{"model":"tiny","prompt":[1]}'))
    assert {name for request in worker.requests for name in request.values(b"x-data-parallel-rank")} == named
