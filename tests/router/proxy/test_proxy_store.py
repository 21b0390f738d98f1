"""A whole router in front of workers that share a store: what is told, what is counted, what is never in the way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engines.store import VllmLayout
from indexer.hashing import pack_tokens
from router.store.spec import StoreSpec
from tests.fakes.raw_client import Answered, RawClient, post
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.store_master import Master, serving
from tests.fakes.waiting import until
from tests.router.proxy.running import running

TOKENS = list(range(1, 101))
LAYOUT = VllmLayout(model="tiny", block_size=16)


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    async with serving(LAYOUT) as found:
        yield found


def spec(master: Master, **more: Any) -> StoreSpec:
    return StoreSpec(url=master.url, block_size=16, **{"budget_ms": 10_000.0, **more})


async def ask(client: RawClient, tokens: list[int] = TOKENS) -> Answered:
    return await client.ask(post("/v1/completions", json.dumps({"model": "tiny", "prompt": tokens}).encode()))


async def test_what_lies_in_the_store_is_told_and_counted(a: ScriptedWorker, master: Master) -> None:
    master.put(pack_tokens(TOKENS), 4)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        got = await ask(client)
        assert (got.status, got.header(b"x-router-store-tokens")) == (200, b"64")
        assert got.header(b"x-router-overlap-tokens") == b"0"
        got = await ask(client)  # the worker has it by now, as far as the router knows
        assert (got.header(b"x-router-overlap-tokens"), got.header(b"x-router-store-tokens")) == (b"96", b"0")
        got = await ask(client, [5] * 40)
        assert got.header(b"x-router-store-tokens") == b"0"
        assert router.total("router_predicted_store_tokens_total") == 64
        assert router.total("router_store_up") == 1
        assert router.total("router_store_lookups_total", outcome="answered") == 3
        assert router.total("router_kv_found_blocks_total", tier="store") == 32, "16 of 4 tokens, and again"
        assert router.total("router_kv_reused_blocks_total", tier="store") == 16
        assert router.total("router_kv_reused_blocks_total", tier="local") == 24
        assert router.total("router_kv_loading_tokens") == 0, "all is loaded"


async def test_connections_that_a_rush_has_left_are_closed_though_nobody_asks_any_more(
    a: ScriptedWorker, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.housekeeping.INTERVAL", 0.02)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        store = router.app._store
        assert store
        await ask(client)
        assert store.master._pool.ended
        monkeypatch.setattr("router.http.pool.IDLE_LIFE", 0.0)
        await until(lambda: not store.master._pool._open)


async def test_a_prompt_without_tokens_is_none_that_a_store_was_asked_for(a: ScriptedWorker, master: Master) -> None:
    content = [{"type": "text", "text": "see " * 64}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        assert (await client.ask(post("/v1/chat/completions", json.dumps(chat).encode()))).status == 200
        assert router.total("router_kv_looked_up_blocks_total", tier="local") > 0
        assert router.total("router_kv_looked_up_blocks_total", tier="store") == 0
        await ask(client)
        assert router.total("router_kv_looked_up_blocks_total", tier="store") > 0
    assert len(master.asked) == 1


async def test_a_worker_that_does_not_use_the_store_is_not_credited(a: ScriptedWorker, master: Master) -> None:
    master.put(pack_tokens(TOKENS), 4)
    settings: dict[str, Any] = {"router_mode": "kv", "store": spec(master), "options": ",store=false"}
    async with running(a, **settings) as router, router.client() as client:
        assert (await ask(client)).header(b"x-router-store-tokens") == b"0"
    assert not master.asked


async def test_without_a_store_nothing_is_told(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        assert (await ask(client)).header(b"x-router-store-tokens") is None


async def test_a_master_that_does_not_answer_delays_nobody_for_long(a: ScriptedWorker, master: Master) -> None:
    master.put(pack_tokens(TOKENS), 4)
    async with running(a, router_mode="kv", store=spec(master, budget_ms=1.0)) as router, router.client() as client:
        master.go_on.clear()
        got = await ask(client)
        assert (got.status, got.header(b"x-router-store-tokens")) == (200, b"0")
        assert router.total("router_store_lookups_total", outcome="late") == 1
        master.go_on.set()


async def test_keys_are_listed_once_where_several_workers_come_at_once(
    a: ScriptedWorker, b: ScriptedWorker, master: Master
) -> None:
    async with running(a, b, router_mode="kv", store=spec(master)):
        assert master.listed == 1


async def test_a_master_that_is_away_from_the_start_is_not_up(a: ScriptedWorker, b: ScriptedWorker) -> None:
    await b.refuse()
    gone = StoreSpec(url=b.url, block_size=16)
    async with running(a, router_mode="kv", store=gone) as router, router.client() as client:
        assert router.total("router_store_up") == 0
        ready = json.loads((await client.ask(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")).body)
        assert (ready["ready"], ready["store"]["up"]) == (True, False)


async def test_ready_tells_of_keys_that_are_not_as_expected(a: ScriptedWorker, master: Master) -> None:
    master.put(pack_tokens(TOKENS), 4)
    master.there = {key.replace("tiny@", "huge@") for key in master.there}
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        ready = json.loads((await client.ask(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")).body)
        assert ready["store"]["up"]
        assert "'huge'" in ready["store"]["problems"]["tiny"]
        assert (await ask(client)).status == 200
