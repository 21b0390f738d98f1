"""Requests for which no worker is up, with `--wait-for-worker`, from the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router import housekeeping
from tests.fakes.raw_client import Answered, RawClient, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer, drop, events, never
from tests.fakes.waiting import until
from tests.router.proxy.administering import HERE, admin_of
from tests.router.proxy.running import RunningRouter, running
from tests.router.proxy.test_proxy_pairs import PREFILLED, router_of

SOON = 0.05
LONG = 600.0
STREAM = post(body=b'{"prompt":"x","stream":true}')
OTHER = post(body=b'{"prompt":"x","model":"other"}')


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", SOON / 5)


@asynccontextmanager
async def patient(*workers: ScriptedWorker, patience: float = LONG, **settings: Any) -> AsyncIterator[RunningRouter]:
    async with running(*workers, **{"wait_for_worker": patience, "health_interval": SOON, **settings}) as router:
        yield router


def held(router: RunningRouter) -> float:
    return router.total("router_queue_length")


async def down(router: RunningRouter, *workers: ScriptedWorker) -> None:
    for worker in workers:
        await worker.refuse()
    await until(lambda: not any(router.is_up(worker) for worker in workers))


async def one_held(router: RunningRouter, client: RawClient, request: bytes = STREAM) -> asyncio.Task[Answered]:
    asked = asyncio.ensure_future(client.ask(request))
    await until(lambda: held(router) == 1)
    return asked


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_a_request_waits_until_its_worker_is_back(a: ScriptedWorker, mode: str) -> None:
    a.then(events(b"1", b"[DONE]"))
    async with patient(a, router_mode=mode) as router, router.client() as client:
        await down(router, a)
        asked = await one_held(router, client)
        await a.listen()
        got = await asked
        assert (got.status, got.body) == (200, b"data: 1\n\ndata: [DONE]\n\n")
        assert held(router) == 0


async def test_its_prompt_counts_all_the_same(a: ScriptedWorker) -> None:
    """Else a worker that is back would get all that waited at once, as if it were no work."""
    a.then(never)
    async with patient(a, router_mode="kv") as router:
        await down(router, a)
        async with router.client() as client:
            asked = await one_held(router, client, post(body=b'{"prompt":"%s"}' % (b"word " * 1000)))
            await a.listen()
            await until(lambda: a.requests)
            assert router.total("router_load_prefill_tokens") > 1000
            asked.cancel()


async def test_so_does_one_that_finds_out_that_it_has_gone(a: ScriptedWorker) -> None:
    async with patient(a, health_interval=LONG) as router, router.client() as client:
        await a.refuse()
        asked = await one_held(router, client)
        assert not router.is_up(a)
        await a.listen()
        router.app._fleet.mark_up(router.app._fleet.workers["a"])
        assert (await asked).header(b"x-router-worker") == b"a"
        assert router.total("router_requests_total") == 1


async def test_it_waits_for_the_first_worker_to_start(a: ScriptedWorker) -> None:
    await a.refuse()
    async with patient(a) as router, router.client() as client:
        asked = await one_held(router, client)
        await a.listen()
        assert (await asked).status == 200


async def test_not_for_ever(a: ScriptedWorker) -> None:
    async with patient(a, patience=SOON) as router, router.client() as client:
        await down(router, a)
        got = await client.ask(STREAM)
        assert (got.status, b"No worker is up" in got.body) == (503, True)
        assert held(router) == 0
        await a.listen()
        await until(lambda: router.is_up(a))
        assert (await client.ask(STREAM)).status == 200


async def test_a_client_that_leaves_is_forgotten(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with patient(a) as router:
        await down(router, a)
        async with router.client() as client:
            asked = await one_held(router, client)
            asked.cancel()
        await until(lambda: held(router) == 0)
        await a.listen()
        await until(lambda: router.is_up(a))
        async with router.client() as client:
            assert (await client.ask(post())).status == 200
        assert len(a.requests) == 1


async def test_no_more_are_held_than_may_be(a: ScriptedWorker) -> None:
    async with patient(a, max_queue=1) as router, router.client() as client, router.client() as other:
        await down(router, a)
        asked = await one_held(router, client)
        assert (await other.ask(STREAM)).status == 503
        await a.listen()
        assert (await asked).status == 200


async def test_what_waits_in_the_queue_goes_on_waiting_when_its_worker_dies(a: ScriptedWorker) -> None:
    a.then(never)
    settings: dict[str, Any] = {"max_worker_concurrency": 1, "max_buffered": 1 << 20}
    async with patient(a, **settings) as router, router.client() as one, router.client() as two:
        first = asyncio.ensure_future(one.ask(post()))
        await until(lambda: a.requests)
        second = await one_held(router, two)
        await down(router, a)
        assert (await first).status == 502
        assert (second.done(), held(router)) == (False, 1)
        await a.listen()
        assert (await second).status == 200


async def test_any_of_those_that_went_down_may_serve_it(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """Also the one that was unreachable when it was tried there."""
    b.then(never)
    settings: dict[str, Any] = {"max_worker_concurrency": 1, "health_interval": LONG}
    async with patient(a, b, **settings) as router, router.client() as one, router.client() as two:
        at = router.app._fleet.workers
        busy = post("/v1/completions", b'{"prompt":"x"}', b"X-Router-Target-Worker: b")
        first = asyncio.ensure_future(one.ask(busy))
        await until(lambda: b.requests)
        await a.refuse()
        second = await one_held(router, two)
        assert (router.is_up(a), len(router.app._queue)) == (False, 1), "it was tried there, and waits for the other"
        router.app._fleet.mark_down(at["b"], "gone")
        await until(lambda: not router.app._queue)
        await a.listen()
        router.app._fleet.mark_up(at["a"])
        assert (await second).header(b"x-router-worker") == b"a"
        first.cancel()


async def test_one_that_names_its_worker_waits_for_that_one(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with patient(a, b) as router, router.client() as client:
        await down(router, a)
        asked = await one_held(router, client, post("/v1/completions", b'{"prompt":"x"}', b"X-Router-Target-Worker: a"))
        assert not b.requests
        await a.listen()
        assert (await asked).header(b"x-router-worker") == b"a"


async def test_even_if_that_one_is_removed_and_added_again(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with patient(a, b, admin_listen=HERE) as router, admin_of(router) as admin, router.client() as client:
        await down(router, a)
        asked = await one_held(router, client, post("/v1/completions", b'{"prompt":"x"}', b"X-Router-Target-Worker: a"))
        await admin.remove("a", timeout="0")
        await admin.until_gone("a")
        await a.listen()
        await admin.add(a)
        assert (await asked).header(b"x-router-worker") == b"a"


@pytest.mark.parametrize(("script", "status"), [(answer(b"{}", 500), 500), (answer(b"{}", 429), 429), (drop, 502)])
async def test_what_a_worker_has_seen_is_not_held(a: ScriptedWorker, script: Any, status: int) -> None:
    a.then(script)
    async with patient(a, health_interval=LONG) as router, router.client() as client:
        assert (await client.ask(STREAM)).status == status
        assert len(a.requests) == 1


async def test_nobody_waits_while_another_can_serve(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with patient(a, b, health_interval=LONG) as router, router.client() as client:
        await a.refuse()
        for _ in range(3):
            assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert held(router) == 0


async def test_nor_for_a_worker_with_another_model(a: ScriptedWorker, b: ScriptedWorker) -> None:
    b.pages.models = ["other"]
    async with patient(a, b) as router, router.client() as client:
        await down(router, a)
        assert (await client.ask(OTHER)).status == 200
        await down(router, b)
        asked = await one_held(router, client, OTHER)
        await a.listen()
        await until(lambda: router.is_up(a))
        assert held(router) == 1
        await b.listen()
        assert (await asked).header(b"x-router-worker") == b"b"


async def test_the_end_of_the_router_ends_the_wait(a: ScriptedWorker) -> None:
    async with patient(a) as router, router.client() as client:
        await down(router, a)
        asked = await one_held(router, client)
        await router.app.drain(0)
        assert (await asked).status == 503


async def test_a_prompt_that_is_computed_waits_for_somebody_to_decode_it() -> None:
    async def slow(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await PREFILLED(dialogue)

    async with (
        ScriptedWorker("p", default=slow) as p,
        ScriptedWorker("d", default=events(b"1", b"[DONE]")) as d,
        router_of("nixl", p, d, wait_for_worker=LONG, health_interval=SOON) as router,
        router.client() as client,
    ):
        client.send(STREAM)
        await until(lambda: p.requests)
        await down(router, d)
        p.go_on.set()
        await until(lambda: held(router) == 1)
        await d.listen()
        assert (await client.answer()).body == b"data: 1\n\ndata: [DONE]\n\n"


async def test_a_tenant_leaves_places_to_others(a: ScriptedWorker) -> None:
    async def ask(tenant: bytes) -> Answered:
        async with router.client() as client:
            return await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"X-Tenant: " + tenant))

    async with patient(a, tenant_header="X-Tenant", max_queue=2) as router:
        await down(router, a)
        many = [asyncio.ensure_future(ask(b"many")) for _ in range(2)]
        await until(lambda: held(router) == 2)
        few = asyncio.ensure_future(ask(b"few"))
        done, _ = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status for task in done] == [503]
        assert (await ask(b"many")).status == 503
        await a.listen()
        assert [(await task).status for task in (*many, few) if task not in done] == [200, 200]
