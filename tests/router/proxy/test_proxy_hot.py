"""Hot prefixes: kept in the shared store, and given to workers that join."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from engines.store import VllmLayout
from indexer.hashing import pack_tokens
from indexer.types import Namespace
from router.store import copies as store_copies
from router.store import keeper as store_keeper
from router.store.copies import StoreCopies
from router.store.hot_prompts import HotPrompt
from router.store.keeper import StoreKeeper, handed_over
from router.store.lookup import StoreLookup
from router.store.master import StoreMaster
from router.store.mooncake_client import MooncakeClient
from router.store.shared_store import SharedStore
from router.store.spec import StoreSpec
from router.workers.fleet import Fleet
from tests.fakes.raw_client import RawClient, post
from tests.fakes.scripted_worker import Pages, ScriptedWorker, answer, drop, never
from tests.fakes.store_master import Master, serving
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

SIZE = 16
LAYOUT = VllmLayout(model="tiny", block_size=SIZE)
SYSTEM = list(range(1, 4 * SIZE + 1))
"""Of four blocks, with which many prompts begin."""


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    async with serving(LAYOUT) as found:
        yield found


def spec(master: Master, keep: int = 0, warm: int = 0) -> StoreSpec:
    return StoreSpec(url=master.url, block_size=SIZE, budget_ms=10_000.0, keep=keep, warm=warm)


async def make_hot(client: RawClient, salt: str | None = None, times: int = 9, model: str = "tiny") -> None:
    for number in range(times):
        body = {"model": model, "prompt": [*SYSTEM, *[1000 + number] * SIZE]} | ({"cache_salt": salt} if salt else {})
        assert (await client.ask(post(body=json.dumps(body).encode()))).status == 200


async def rejoin(router: RunningRouter, worker: ScriptedWorker) -> None:
    """As if it had just started."""
    fleet = router.app._fleet
    fleet.mark_down(fleet.workers[worker.name], "gone")
    assert router.app._roster
    await router.app._roster._resources.set_up(fleet.workers[worker.name])


async def test_a_worker_that_joins_takes_in_what_is_asked_for_most(a: ScriptedWorker, master: Master) -> None:
    async with running(a, router_mode="kv", store=spec(master, warm=2)) as router, router.client() as client:
        assert not a.requests, "there is nothing hot at the start"
        await make_hot(client)
        await make_hot(client, salt="tenant", times=5)
        asked = len(a.requests)
        await rejoin(router, a)
        sent = [json.loads(request.body) for request in a.requests[asked:]]
        assert sent == [
            {"model": "tiny", "prompt": SYSTEM, "max_tokens": 1},
            {"model": "tiny", "prompt": SYSTEM, "max_tokens": 1, "cache_salt": "tenant"},
        ]


async def test_a_worker_takes_in_only_what_is_for_its_models(a: ScriptedWorker, master: Master) -> None:
    """Others would be computed, by an engine that takes any model's name."""
    async with (
        ScriptedWorker("b", Pages(models=["small"])) as b,
        running(a, b, router_mode="kv", store=spec(master, warm=2)) as router,
        router.client() as client,
    ):
        await make_hot(client)
        await rejoin(router, b)
        assert not b.requests


async def test_an_adapters_prompts_are_taken_in_by_the_name_that_makes_the_engine_use_it(master: Master) -> None:
    said = {"page_size": SIZE, "dp_size": 1, "max_total_num_tokens": 40_000, "version": "0.5.23"}
    async with (
        ScriptedWorker("a", Pages(server_info=said, adapters=["poet"])) as a,
        running(a, router_mode="kv", store=spec(master, warm=2)) as router,
        router.client() as client,
    ):
        await make_hot(client, model="tiny:poet")
        asked = len(a.requests)
        await rejoin(router, a)
        assert [json.loads(request.body)["model"] for request in a.requests[asked:]] == ["tiny:poet"]


async def test_what_is_hot_of_adapters_that_others_have_takes_no_place_of_what_a_worker_can_take_in(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_keeper, "MOST", 1)  # dozens of adapters have more than that in all
    said = {"page_size": SIZE, "dp_size": 1, "max_total_num_tokens": 40_000, "version": "0.5.23"}
    async with (
        ScriptedWorker("a", Pages(server_info=said, adapters=["poet"])) as a,
        ScriptedWorker("b", Pages(server_info=said)) as b,
        running(a, b, router_mode="kv", store=spec(master, warm=1)) as router,
        router.client() as client,
    ):
        await make_hot(client, model="tiny:poet", times=20)
        await make_hot(client)
        asked = len(b.requests)
        await rejoin(router, b)
        sent = [json.loads(request.body) for request in b.requests[asked:]]
        assert sent == [{"model": "tiny", "prompt": SYSTEM, "max_tokens": 1}]


async def test_without_being_told_nothing_is_replayed(a: ScriptedWorker, master: Master) -> None:
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        await make_hot(client)
        asked = len(a.requests)
        await rejoin(router, a)
        assert len(a.requests) == asked


@pytest.mark.parametrize(
    ("script", "limit", "reason"),
    [
        (answer(b"no", 500), 10.0, "it answered 500"),
        (drop, 10.0, "it closed the connection without an answer"),
        (never, 0.1, "it did not answer in time"),
    ],
    ids=["500", "drop", "never"],
)
async def test_a_worker_that_cannot_be_warmed_serves_all_the_same(
    a: ScriptedWorker,
    master: Master,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: object,
    limit: float,
    reason: str,
) -> None:
    monkeypatch.setattr(store_keeper, "WARM_LIMIT", limit)
    async with running(a, router_mode="kv", store=spec(master, warm=1)) as router, router.client() as client:
        await make_hot(client)
        a.then(script, script)  # type: ignore[arg-type]
        await rejoin(router, a)
        told = [(each.message, vars(each)["fields"]) for each in caplog.records if each.name == store_keeper.__name__]
        assert told == [("A worker joins half warm", {"worker": "a", "prefixes": 0, "reason": reason})]
        fleet = router.app._fleet
        fleet.mark_up(fleet.workers["a"])
        a.behave()
        assert (await client.ask(post())).status == 200


@pytest.mark.parametrize(("budget", "leased"), [(100, 4), (4, 4), (3, 0), (0, 0)])
async def test_hot_prefixes_that_are_there_get_leases_within_the_budget(
    a: ScriptedWorker, master: Master, budget: int, leased: int
) -> None:
    master.put(pack_tokens(SYSTEM), 4)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        await make_hot(client)
        await make_hot(client, salt="tenant", times=20)  # hotter, and not there
        store = router.app._store
        assert store
        assert await StoreKeeper(store, budget).renew() == leased
        digests = LAYOUT.hashes(pack_tokens(SYSTEM), Namespace()) or []
        assert sorted(master.leased) == sorted(key for digest in digests for key in LAYOUT.keys(digest))[:leased]


async def test_a_beginning_that_hot_prefixes_share_takes_its_part_of_the_budget_once(
    a: ScriptedWorker, master: Master
) -> None:
    longer = [*SYSTEM, *range(500, 500 + 4 * SIZE)]
    master.put(pack_tokens(longer), 8)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        await make_hot(client)
        for _ in range(6):
            assert (await client.ask(post(body=json.dumps({"model": "tiny", "prompt": longer}).encode()))).status == 200
        store = router.app._store
        assert store
        assert [len(prompt.chain) for _, _, prompt in store.hottest_prompts(2)] == [4, 8]
        assert await StoreKeeper(store, budget=8).renew() == 8
        assert sorted(master.leased) == sorted(master.there)


@pytest.mark.parametrize("first", [True, False])
async def test_of_several_processes_one_keeps_what_is_hot(a: ScriptedWorker, master: Master, *, first: bool) -> None:
    """Each by itself would take a lease on as many objects as there may be."""
    async with running(a, router_mode="kv", store=spec(master)) as router:
        app = router.app
        app._is_first = first
        assert app._store
        app._look_after_store(app._store, spec(master, keep=4))
        assert ("store keeper" in {task.get_name() for task in app._tasks}) is first


async def test_leases_do_not_wait_for_each_other(
    a: ScriptedWorker, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else thousands would take longer than one lasts."""
    asked: list[str] = []

    async def lease(_: StoreMaster, key: str) -> bool:
        asked.append(key)
        await until(lambda: len(asked) == 4)
        return True

    master.put(pack_tokens(SYSTEM), 4)
    monkeypatch.setattr(StoreMaster, "lease", lease)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        await make_hot(client)
        assert router.app._store
        assert await StoreKeeper(router.app._store, budget=4).renew() == 4


class _FailingOnce(SharedStore):
    """As far as both rounds over it ask; the second time there is nothing hot."""

    def __init__(self) -> None:
        self.asked = 0

    def hottest_prompts(self, number: int) -> list[tuple[str, StoreLookup, HotPrompt]]:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("of whatever kind")
        return []


async def test_what_nobody_thought_of_does_not_end_the_renewals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_keeper, "INTERVAL", 0)
    store = _FailingOnce()
    task = asyncio.create_task(StoreKeeper(store, budget=1).run())
    await until(lambda: store.asked > 2)
    task.cancel()
    assert [each.getMessage() for each in caplog.records] == ["The store's leases could not be renewed"]


async def test_what_nobody_thought_of_does_not_end_the_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_copies, "INTERVAL", 0)
    asked = 0

    async def spread(_: StoreCopies) -> int:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("of whatever kind")
        return 0

    monkeypatch.setattr(StoreCopies, "spread", spread)
    copies = StoreCopies(_FailingOnce(), Fleet([]), lambda _: 0, MooncakeClient("127.0.0.1:1"), 1)
    task = asyncio.create_task(copies.run())
    await until(lambda: asked > 2)
    task.cancel()
    assert [each.getMessage() for each in caplog.records] == ["Hot prefixes could not be copied in the store"]


async def test_a_worker_may_leave_when_the_store_has_what_is_hot_there(a: ScriptedWorker, master: Master) -> None:
    settings: dict[str, Any] = {"router_mode": "kv", "store": spec(master), "options": f",block_size={SIZE}"}
    async with running(a, **settings) as router, router.client() as client:
        store, indexer, worker = router.app._store, router.app._indexer, router.app._fleet.workers["a"]
        assert store
        assert await handed_over(worker, store, indexer), "nothing is hot"
        await make_hot(client)
        assert not await handed_over(worker, store, indexer)
        master.put(pack_tokens(SYSTEM), 3)
        assert not await handed_over(worker, store, indexer)
        master.put(pack_tokens(SYSTEM), 4)
        assert await handed_over(worker, store, indexer)


async def test_a_worker_that_puts_nothing_into_the_store_may_leave_at_once(a: ScriptedWorker, master: Master) -> None:
    settings: dict[str, Any] = {"router_mode": "kv", "store": spec(master), "options": f",block_size={SIZE}"}
    async with running(a, **settings) as router, router.client() as client:
        store, indexer, worker = router.app._store, router.app._indexer, router.app._fleet.workers["a"]
        assert store
        await make_hot(client)
        assert not await handed_over(worker, store, indexer)
        router.app._fleet.restate(worker, structs.replace(worker.spec, store=False))
        assert await handed_over(worker, store, indexer)


async def test_what_has_no_known_name_in_the_store_is_not_waited_for(master: Master) -> None:
    settings: dict[str, Any] = {"router_mode": "kv", "store": spec(master), "options": f",block_size={SIZE}"}
    async with (
        ScriptedWorker("a", Pages(adapters=["poet"])) as a,  # it does not tell the adapter's path
        running(a, **settings) as router,
        router.client() as client,
    ):
        store, indexer, worker = router.app._store, router.app._indexer, router.app._fleet.workers["a"]
        assert store
        await make_hot(client, model="poet")
        assert [prompt.namespace for _, _, prompt in store.hottest_prompts(1)] == [Namespace("poet")]
        assert await handed_over(worker, store, indexer)


async def test_nothing_is_leased_unless_asked_for(a: ScriptedWorker, master: Master) -> None:
    master.put(pack_tokens(SYSTEM), 4)
    async with running(a, router_mode="kv", store=spec(master)) as router, router.client() as client:
        await make_hot(client)
        assert "store keeper" not in {task.get_name() for task in router.app._tasks}
    assert not master.leased
