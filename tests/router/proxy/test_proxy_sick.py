"""Workers that are sick though their health checks pass: they keep failing, or they accept and say nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from router import housekeeping
from router.workers.breaker import FAILURES, LONGEST
from tests.fakes.raw_client import Answered, RawClient, post
from tests.fakes.scripted_worker import Dialogue, Script, ScriptedWorker, answer, drop, events, held_stream, never, says
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

STREAM = post(body=b'{"prompt":"x","stream":true}')
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SOON = 0.05
LONG = 30.0


def later(router: RunningRouter) -> None:
    """The time of a breaker that is open is over."""
    router.app._fleet.tick(time.monotonic() + LONGEST)


async def fail_often(router: RunningRouter, client: RawClient, worker: ScriptedWorker) -> None:
    """Until its breaker opens; what it fails others answer."""
    asked = len(worker.requests)
    while router.breaker(worker) == "closed":
        assert (await client.ask(STREAM)).status == 200
    assert len(worker.requests) - asked == FAILURES


FAILING: dict[str, Script] = {"500": answer(b"{}", 500), "drop": drop}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING.keys())
async def test_a_worker_that_keeps_failing_gets_nothing_and_the_others_all(b: ScriptedWorker, failing: Script) -> None:
    async with ScriptedWorker("a", default=failing) as a, running(a, b) as router, router.client() as client:
        await fail_often(router, client, a)
        asked = len(a.requests)
        for _ in range(10):
            assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert len(a.requests) == asked
        assert (router.is_up(a), router.breaker(b)) == (True, "closed")


async def test_one_request_probes_it_and_takes_it_back(b: ScriptedWorker) -> None:
    async with ScriptedWorker("a", default=answer(b"{}", 500)) as a, running(a, b) as router, router.client() as client:
        await fail_often(router, client, a)
        a.then(answer())
        later(router)
        assert router.breaker(a) == "half-open"
        asked = len(a.requests)
        assert {(await client.ask(post())).header(b"x-router-worker") for _ in range(2)} == {b"a", b"b"}
        assert (len(a.requests) - asked, router.breaker(a)) == (1, "closed")


async def test_no_second_request_goes_there_before_the_first_is_answered(b: ScriptedWorker) -> None:
    async def slow(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await answer()(dialogue)

    async with ScriptedWorker("a", default=answer(b"{}", 500)) as a, running(a, b) as router, router.client() as client:
        await fail_often(router, client, a)
        a.then(slow)
        later(router)
        asked = len(a.requests)
        async with router.client() as other:
            other.send(post())
            client.send(post())
            await until(lambda: len(a.requests) > asked)
            for _ in range(5):
                async with router.client() as third:
                    assert (await third.ask(post())).header(b"x-router-worker") == b"b"
            assert len(a.requests) == asked + 1
            a.go_on.set()
            got = [await each.answer() for each in (client, other)]
            assert {each.header(b"x-router-worker") for each in got} == {b"a", b"b"}


async def test_a_probe_that_fails_keeps_it_out(b: ScriptedWorker) -> None:
    async with ScriptedWorker("a", default=answer(b"{}", 500)) as a, running(a, b) as router, router.client() as client:
        await fail_often(router, client, a)
        later(router)
        asked = len(a.requests)
        for _ in range(4):
            assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert (len(a.requests) - asked, router.breaker(a)) == (1, "open")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("status", "then"), [(400, "closed"), (503, "half-open"), (500, "open")])
async def test_a_probe_that_is_refused_takes_it_back_but_one_that_it_has_no_room_for_does_not(
    a: ScriptedWorker, status: int, then: str, streamed: bool
) -> None:
    error = b'{"error":{"message":"no","code":%d}}' % status
    a.then(events(error) if streamed else answer(error, status))
    async with running(a) as router, router.client() as client:
        router.app._fleet.trip(router.app._fleet.workers["a"], "it was sick", 0.0)
        later(router)
        assert (await client.ask(STREAM)).status == (200 if streamed else status)
        assert router.breaker(a) == then


async def test_where_all_are_sick_any_is_tried(a: ScriptedWorker) -> None:
    a.then(*[answer(b"{}", 500)] * FAILURES)
    async with running(a) as router, router.client() as client:
        for _ in range(FAILURES):
            assert (await client.ask(post())).status == 500
        assert router.breaker(a) == "open"
        assert (await client.ask(post())).status == 200


async def test_its_return_after_it_was_down_is_a_new_start(b: ScriptedWorker) -> None:
    async with ScriptedWorker("a", default=answer(b"{}", 500)) as a, running(a, b) as router, router.client() as client:
        await fail_often(router, client, a)
        fleet = router.app._fleet
        fleet.mark_down(fleet.workers["a"], "gone")
        fleet.mark_up(fleet.workers["a"])
        assert router.breaker(a) == "closed"


# -- silence


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", SOON / 5)


async def test_a_stream_that_does_not_begin_is_asked_of_another(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(never)
    b.then(events(b"1", b"[DONE]"))
    async with running(a, b, first_byte_timeout=SOON) as router, router.client() as client:
        got = await client.ask(STREAM)
        assert (got.status, got.header(b"x-router-worker")) == (200, b"b")
        await until(lambda: a.dialogues[0].is_over)


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_so_is_a_stream_of_another_api(a: ScriptedWorker, b: ScriptedWorker, path: str, mode: str) -> None:
    streamed = post(path, b'{"input":"x","messages":[{"role":"user","content":"x"}],"stream":true}')

    async def once(dialogue: Dialogue) -> None:
        """The first worker that is asked says nothing, whichever it is."""
        await (never if len(a.requests + b.requests) == 1 else events(b"1", b"[DONE]"))(dialogue)

    a.then(once)
    b.then(once)
    async with running(a, b, router_mode=mode, first_byte_timeout=SOON) as router, router.client() as client:
        assert (await client.ask(streamed)).status == 200
        assert len(a.requests) == len(b.requests) == 1


async def test_a_stream_that_never_begins_anywhere_is_a_504(a: ScriptedWorker) -> None:
    a.then(never)
    async with running(a, first_byte_timeout=SOON) as router, router.client() as client:
        got = await client.ask(STREAM)
        assert (got.status, b"sent nothing for 0.05 s" in got.body) == (504, True)
        assert (await client.ask(post())).status == 200


async def test_a_stream_that_stands_still_ends_in_an_error(a: ScriptedWorker) -> None:
    a.then(says(SSE + b"9\r\ndata: 1\n\n\r\n"))
    async with running(a, idle_timeout=SOON) as router, router.client() as client:
        got = await client.ask(STREAM)
        assert got.status == 200
        assert got.body.startswith(b"data: 1\n\ndata: {")
        assert b"stood still" not in got.body
        assert b"sent nothing for 0.05 s" in got.body
        await until(lambda: a.dialogues[0].is_over)
        assert (await client.ask(post())).status == 200


async def test_an_answer_that_comes_whole_may_take_its_time(a: ScriptedWorker) -> None:
    async def slow(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await answer()(dialogue)

    a.then(slow)
    limits: dict[str, Any] = {"first_byte_timeout": SOON, "idle_timeout": SOON, "stall_timeout": SOON}
    async with running(a, **limits) as router, router.client() as client:
        client.send(post())
        await until(lambda: a.requests)
        await asyncio.sleep(3 * SOON)  # limits that do not hold here
        a.go_on.set()
        assert (await client.answer()).status == 200


async def test_a_request_is_given_up_after_its_time_in_all(a: ScriptedWorker) -> None:
    a.then(never)
    async with running(a, request_timeout=SOON) as router, router.client() as client:
        got = await client.ask(post())
        assert (got.status, b"--request-timeout" in got.body) == (504, True)
        await until(lambda: a.dialogues[0].is_over)
        assert router.samples("router_requests_total") == {a.name: 1}, "it was there, and says so where it is counted"


class StoppedOnce:
    """The sleep and the clock of a process that is stopped while it sleeps: when it wakes, much time has passed, and
    `wake` was called, but nothing was read. It does not sleep to its end again before `read`."""

    def __init__(self, wake: Callable[[], None], read: asyncio.Event) -> None:
        self._wake = wake
        self._read = read
        self._now = time.monotonic()
        self._sleeps = 0

    def clock(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._sleeps += 1
        if self._sleeps == 2:  # it has looked once
            self._now += 10 * LONG
            self._wake()
        elif self._sleeps == 3:
            await self._read.wait()
        else:
            await asyncio.sleep(seconds)


async def test_what_came_while_the_router_itself_stood_still_counts(a: ScriptedWorker) -> None:
    """It was stopped, or its machine was: nobody else has been silent."""

    a.then(held_stream)
    async with running(a, stall_timeout=LONG, idle_timeout=LONG) as router, router.client() as client:
        client.send(STREAM)
        assert (await client.head()).status == 200
        got, read = (await client.chunk())[1], asyncio.Event()
        stopped = StoppedOnce(lambda: a.dialogues[0].send_at_once(b"9\r\ndata: 2\n\n\r\n"), read)
        chores = router.app._housekeeping
        assert chores
        chores._clock, chores._sleep = stopped.clock, stopped.sleep
        got += (await client.chunk())[1]
        read.set()
        a.go_on.set()
        while piece := (await client.chunk())[1]:
            got += piece
        assert got == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert router.breaker(a) == "closed"


async def test_a_worker_that_accepts_and_emits_nothing_is_kept_out(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(never, says(SSE + b"9\r\ndata: 1\n\n\r\n"))
    b.then(*[events(b"2", b"[DONE]")] * 3)

    async def ask(router: RunningRouter) -> Answered:
        async with router.client() as client:
            return await client.ask(STREAM)

    async with running(a, b, stall_timeout=5 * SOON) as router:
        got = await asyncio.gather(*(ask(router) for _ in range(4)))
        assert router.breaker(a) == "open"
        assert [answered.status for answered in got] == [200] * 4
        bodies = sorted(answered.body for answered in got)
        assert bodies[1:] == [b"data: 2\n\ndata: [DONE]\n\n"] * 3, "what had not begun was asked of the other"
        assert bodies[0].startswith(b'data: 1\n\ndata: {"error"')
        assert router.is_up(a), "its health check still says that all is well"
