"""Requests that the router holds or refuses, from the client's side: what is answered, and what a worker sees."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from router.scheduling.queue import Queue
from tests.fakes.raw_client import RawClient, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer, drop
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

LONG: dict[str, Any] = {"prompt": [5] * 90_000, "stream": True}
"""Takes seconds by the priors: whatever else the machine does meanwhile, what comes after it is held."""
SHORT: dict[str, Any] = {"prompt": [7, 8, 9], "stream": True}


async def on_the_word(dialogue: Dialogue) -> None:
    """An event when the test says so, and the end."""
    await dialogue.go_on.wait()
    dialogue.events_head()
    dialogue.event(b"1")
    dialogue.end()


def asking(body: dict[str, Any], *headers: bytes) -> bytes:
    return post("/v1/completions", json.dumps({"model": "tiny", **body}).encode(), *headers)


def queue_of(router: RunningRouter) -> Queue:
    return router.app._queue


@pytest.fixture(autouse=True)
def long_prompts(a: ScriptedWorker, b: ScriptedWorker) -> None:
    for worker in (a, b):
        worker.pages.max_model_len = 1_000_000


async def busy(client: RawClient, worker: ScriptedWorker) -> asyncio.Task[Any]:
    """One long prompt is under way there."""
    worker.then(on_the_word)
    asked = asyncio.ensure_future(client.ask(asking(LONG, b"X-Router-Target-Worker: " + worker.name.encode())))
    await until(lambda: worker.requests)
    return asked


async def test_a_held_request_is_sent_when_its_worker_is_ready(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as one, router.client() as two:
        first = await busy(one, a)
        second = asyncio.ensure_future(two.ask(asking(SHORT)))
        await until(lambda: len(queue_of(router)) == 1)
        assert len(a.requests) == 1
        assert router.total("router_load_requests") == 1
        assert router.total("router_requests_in_flight") == 2
        a.go_on.set()
        assert {(await first).status, (await second).status} == {200}
        assert [len(json.loads(request.body)["prompt"]) for request in a.requests] == [len(LONG["prompt"]), 3]


async def test_a_fault_of_the_router_itself_is_answered_to_who_is_held_too(a: ScriptedWorker) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with running(a, router_mode="kv") as router, router.client() as one, router.client() as two:
        first = await busy(one, a)
        second = asyncio.ensure_future(two.ask(asking(SHORT)))
        await until(lambda: len(queue_of(router)) == 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router.app._scheduler, "_policy", SimpleNamespace(choose=fail))
            assert (await second).status == 500
        assert len(queue_of(router)) == 0
        a.go_on.set()
        assert (await first).status == 200
        assert (await two.ask(asking(SHORT))).status == 200


async def test_a_client_that_leaves_while_it_is_held_leaves_nothing(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as one:
        first = await busy(one, a)
        async with router.client() as two:
            left = asyncio.ensure_future(two.ask(asking(SHORT)))
            await until(lambda: len(queue_of(router)) == 1)
            left.cancel()
        await until(lambda: len(queue_of(router)) == 0)
        assert router.total("router_requests_total", status="499") == 1
        a.go_on.set()
        assert (await first).status == 200
        await router.at_rest()
        assert len(a.requests) == 1


async def test_a_retry_is_held_like_any_other(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """The one that is left is busy."""
    async with running(a, b, router_mode="kv") as router, router.client() as one, router.client() as two:
        first = await busy(one, a)
        b.then(drop)
        second = asyncio.ensure_future(two.ask(asking(SHORT)))
        await until(lambda: len(queue_of(router)) == 1)
        assert [len(worker.requests) for worker in (a, b)] == [1, 1]
        assert router.total("router_load_requests") == 1
        a.go_on.set()
        assert (await first).status == 200
        answered = await second
        assert (answered.status, answered.header(b"x-router-worker")) == (200, b"a")


async def test_a_held_retry_is_told_that_its_last_worker_fails_too(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """Both are up, as /ready shows: it is no help to say that none is."""
    async with running(a, b, router_mode="kv") as router, router.client() as one, router.client() as two:
        first = await busy(one, a)
        b.then(drop)
        second = asyncio.ensure_future(two.ask(asking(SHORT)))
        await until(lambda: len(queue_of(router)) == 1)
        fleet = router.app._fleet
        fleet.trip(fleet.workers["a"], "it fails", time.monotonic())
        queue_of(router).wake()
        refused = await second
        assert (refused.status, [worker.id for worker in fleet.up]) == (503, ["a", "b"])
        assert "Workers have failed the request" in json.loads(refused.body)["error"]["message"]
        a.go_on.set()
        assert (await first).status == 200


@pytest.mark.parametrize("own", [False, True], ids=["by setting", "by header"])
async def test_what_would_miss_its_objective_is_refused_with_429(a: ScriptedWorker, own: bool) -> None:
    settings: dict[str, Any] = {} if own else {"ttft_slo": 0.05}
    headers = [b"X-Router-TTFT-SLO: 0.05"] if own else []
    async with (
        running(a, router_mode="kv", kv_policy="ttft", **settings) as router,
        router.client() as one,
        router.client() as two,
    ):
        first = await busy(one, a)
        refused = await two.ask(asking(SHORT, *headers))
        assert refused.status == 429
        assert int(refused.header(b"retry-after") or 0) >= 1
        error = json.loads(refused.body)["error"]
        assert (error["code"], error["type"], error["limit_seconds"]) == ("ttft_slo", "rate_limit_error", 0.05)
        assert error["predicted_seconds"] > 0.05
        assert router.total("router_refused_total", objective="ttft") == 1
        assert router.total("router_load_requests") == 1
        a.go_on.set()
        assert (await first).status == 200
        assert (await two.ask(asking(SHORT, *headers))).status == 200, "an idle worker is always asked"
        assert len(a.requests) == 2


@pytest.mark.parametrize("value", [b"soon", b"", b"0", b"-1", b"nan", b"inf", b"1s"])
async def test_an_objective_that_is_no_time_is_a_bad_request(a: ScriptedWorker, value: bytes) -> None:
    async with running(a) as router, router.client() as client:
        for request in (
            asking(SHORT, b"X-Router-TTFT-SLO: " + value),
            post("/v1/other", b"{}", b"X-Router-TTFT-SLO: " + value),
        ):
            got = await client.ask(request)
            assert got.status == 400
            assert "x-router-ttft-slo" in json.loads(got.body)["error"]["message"].lower()
        assert (await client.ask(asking(SHORT))).status == 200
    assert len(a.requests) == 1


@pytest.mark.parametrize("value", [b"high", b"", b"1.5", b"nan", b"2147483649", b"-2147483649", b"9" * 20, b"9" * 5000])
async def test_a_priority_that_is_no_whole_number_is_a_bad_request(a: ScriptedWorker, value: bytes) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(asking(SHORT, b"X-Router-Priority: " + value))
        assert got.status == 400
        message = json.loads(got.body)["error"]["message"]
        assert message == "The header X-Router-Priority must be a whole number from -2147483648 to 2147483648."
    assert not a.requests


async def test_workers_do_not_see_what_is_meant_for_the_router(a: ScriptedWorker) -> None:
    a.then(answer())
    async with running(a) as router, router.client() as client:
        await client.ask(asking(SHORT, b"X-Router-TTFT-SLO: 5", b"X-Router-Priority: -3", b"Accept: a/b"))
    (request,) = a.requests
    names = [name for name, _ in request.headers]
    assert b"accept" in names
    assert [name for name in names if name.startswith(b"x-router-")] == [b"x-router-via"]


async def test_held_requests_go_by_priority(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as one, router.client() as two:
        first = await busy(one, a)
        prompts = {3: b"0", 4: b"5", 5: b"-5"}
        async with router.client() as three, router.client() as four:
            asked = []
            for client, (length, priority) in zip((two, three, four), prompts.items(), strict=True):
                body = {"prompt": [7] * length, "stream": True}
                asked.append(asyncio.ensure_future(client.ask(asking(body, b"X-Router-Priority: " + priority))))
                await until(lambda: len(queue_of(router)) == len(asked))
            a.go_on.set()
            assert {(await each).status for each in (first, *asked)} == {200}
    assert [len(json.loads(request.body)["prompt"]) for request in a.requests[1:]] == [5, 3, 4]
