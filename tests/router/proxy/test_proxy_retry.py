"""A worker that fails before its first byte: another gets the request, once; and connections that are used again."""

from __future__ import annotations

import asyncio
import os
import resource

import pytest

from router.scheduling.decision import Choice, Policy, Situation, Uniform
from tests.fakes.raw_client import PATIENCE, get, post
from tests.fakes.scripted_worker import Dialogue, Script, ScriptedWorker, answer, drop, events, never, reset, says
from tests.fakes.waiting import until
from tests.router.proxy.running import running

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

BROKEN: dict[str, Script] = {
    "dropped": drop,
    "reset": reset,
    "cut in its head": says(b"HTTP/1.1 200 OK\r\nconte", then=Dialogue.drop),
    "cut after its head": says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", then=Dialogue.drop),
    "cut after the head of a stream": says(SSE, then=Dialogue.drop),
    "no HTTP": says(b"SSH-2.0-OpenSSH\r\n\r\n"),
    "a head without end": says(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 1_100_000),
    "bad chunks": says(SSE + b"zzz\r\n"),
}
BUSY = [429, 503]
STATUSES = [500, 502, *BUSY]
FAILING = BROKEN | {str(status): answer(b'{"error":"theirs"}', status) for status in STATUSES}
HARMED = {name: script for name, script in FAILING.items() if name not in map(str, BUSY)}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING.keys())
async def test_another_worker_gets_it_once(a: ScriptedWorker, b: ScriptedWorker, failing: Script) -> None:
    a.then(failing, failing)
    b.then(events(b"1", b"[DONE]"))
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post(body=b'{"prompt":"x","stream":true}'))
        assert (got.status, got.body) == (200, b"data: 1\n\ndata: [DONE]\n\n")
        assert got.header(b"x-router-worker") == b"b"
        assert router.samples("router_retries_total") == {"a": 1}
        assert router.is_up(a)
    assert [len(worker.requests) for worker in (a, b)] == [1, 1]
    assert a.requests[0].body == b.requests[0].body


@pytest.mark.parametrize("status", BUSY)
async def test_who_was_too_busy_for_a_prompt_is_not_thought_to_hold_it(
    a: ScriptedWorker, b: ScriptedWorker, status: int
) -> None:
    def asked(tokens: int, *headers: bytes) -> bytes:
        return post("/v1/completions", b'{"prompt":%s}' % str(list(range(1, tokens + 1))).encode(), *headers)

    async with running(a, b, router_mode="kv", kv_events=False) as router, router.client() as client:
        await client.ask(asked(8, b"x-router-target-worker: a"))
        a.then(answer(b"busy", status))
        b.then(answer(b"busy", status))
        assert (await client.ask(asked(20))).status == status
        assert [len(worker.requests) for worker in (a, b)] == [2, 1]
        overlaps = {}
        for name in (b"a", b"b"):
            got = await client.ask(asked(20, b"x-router-target-worker: " + name))
            overlaps[name] = got.header(b"x-router-overlap-tokens")
    assert overlaps == {b"a": b"8", b"b": b"0"}, "what it held before, and no more"


async def test_who_refuses_a_prompt_is_not_thought_to_hold_it(a: ScriptedWorker) -> None:
    ask = post("/v1/completions", b'{"prompt":[1,2,3,4,5,6,7,8,9]}')
    async with running(a, router_mode="kv", kv_events=False) as router, router.client() as client:
        overlaps = []
        for status in (400, 200, 200):
            a.then(answer(b"{}", status))
            got = await client.ask(ask)
            assert got.status == status
            overlaps.append(got.header(b"x-router-overlap-tokens"))
    assert overlaps == [b"0", b"0", b"8"]


@pytest.mark.parametrize("failing", HARMED.values(), ids=HARMED.keys())
async def test_two_failures_are_enough(failing: Script) -> None:
    """A request that crashes engines must not take them all."""
    async with (
        ScriptedWorker("a", default=failing) as a,
        ScriptedWorker("b", default=failing) as b,
        ScriptedWorker("c") as c,
        running(a, b, c) as router,
        router.client() as client,
    ):
        got = await client.ask(post())
        assert got.status in {500, 502}
        assert [len(worker.requests) for worker in (a, b, c)] == [1, 1, 0]
        assert (await client.ask(post())).status == 200  # the client's connection goes on


async def test_two_deaths_are_enough_over_connections_that_were_open(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """A break on a connection that is used again may be taken for its age; the refusal after it tells."""
    async with ScriptedWorker("c") as c, running(a, b, c) as router, router.client() as client:
        for worker in (a, b, c):
            worker.then(answer(), worker.die, worker.die)
        assert [(await client.ask(post())).status for _ in range(3)] == [200] * 3
        got = await client.ask(post(body=b'{"prompt":"poison"}'))
        assert got.status == 502
        assert sorted(len(worker.requests) for worker in (a, b, c)) == [1, 2, 2]


@pytest.mark.parametrize("status", BUSY)
async def test_the_busy_are_passed_over_until_somebody_has_room(status: int) -> None:
    busy = answer(b'{"error":"theirs"}', status)
    async with (
        ScriptedWorker("a", default=busy) as a,
        ScriptedWorker("b", default=busy) as b,
        ScriptedWorker("c") as c,
        running(a, b, c) as router,
        router.client() as client,
    ):
        for asked in range(1, 9):  # more than it takes to open a breaker
            assert (await client.ask(post())).header(b"x-router-worker") == b"c"
            assert [len(worker.requests) for worker in (a, b, c)] == [asked] * 3
        assert [router.breaker(worker) for worker in (a, b)] == ["closed"] * 2
        assert router.is_up(a)


def errs_at_once(code: int) -> Script:
    """As SGLang answers a stream while its queue is full, and vLLM one that waited when its engine died."""
    error = b'data: {"error":{"object":"error","message":"x","type":"X","param":null,"code":%d}}\n\n' % code
    return says(SSE + b"%x\r\n%s\r\n" % (len(error), error), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


STREAMED = b'{"prompt":"x","stream":true}'


@pytest.mark.parametrize("status", STATUSES)
async def test_an_error_where_a_stream_should_begin_is_one(a: ScriptedWorker, b: ScriptedWorker, status: int) -> None:
    a.then(errs_at_once(status))
    b.then(events(b"1", b"[DONE]"))
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post(body=STREAMED))
        assert (got.status, got.body) == (200, b"data: 1\n\ndata: [DONE]\n\n")
        assert router.samples("router_retries_total") == {"a": 1}
        assert router.total("router_requests_total", worker="b", status="200", end="complete") == 1


async def test_so_is_one_of_messages(a: ScriptedWorker, b: ScriptedWorker) -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
    a.then(says(SSE + b"%x\r\n%s\r\n" % (len(error), error), b"0\r\n\r\n"))
    b.then(events(b"1"))
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post("/v1/messages", b'{"model":"m","messages":[],"stream":true}'))
    assert (got.status, got.body) == (200, b"data: 1\n\n")


async def test_who_is_too_busy_for_a_stream_is_not_taken_for_broken(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with ScriptedWorker("c") as c, running(a, b, c) as router, router.client() as client:
        for _ in range(8):  # more than it takes to open a breaker
            for busy in (a, b):
                busy.then(errs_at_once(503))
            assert (await client.ask(post(body=STREAMED))).header(b"x-router-worker") == b"c"
        assert [router.breaker(worker) for worker in (a, b)] == ["closed"] * 2


@pytest.mark.parametrize("status", [400, *STATUSES])
async def test_a_stream_that_is_an_error_everywhere_is_passed_on_and_counts_as_one(
    a: ScriptedWorker, status: int
) -> None:
    a.then(errs_at_once(status))
    async with running(a) as router, router.client() as client:
        got = await client.ask(post(body=STREAMED))
        assert got.status == 200
        assert got.body.startswith(b'data: {"error":')
        assert got.body.endswith(b"data: [DONE]\n\n")
        assert router.total("router_requests_total", status=str(status), end="complete") == 1
        assert router.total("router_worker_failures_total") == (status in STATUSES)


async def test_an_error_of_the_request_is_not_tried_elsewhere(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(errs_at_once(400))
    async with running(a, b) as router, router.client() as client:
        assert b'"code":400' in (await client.ask(post(body=STREAMED))).body
    assert b.requests == []


async def test_who_begins_a_stream_with_an_error_is_not_thought_to_hold_the_prompt(a: ScriptedWorker) -> None:
    ask = post("/v1/completions", b'{"prompt":[1,2,3,4,5,6,7,8,9],"stream":true}')
    async with running(a, router_mode="kv", kv_events=False) as router, router.client() as client:
        overlaps = []
        for script in (errs_at_once(503), events(b"1", b"[DONE]"), events(b"1", b"[DONE]")):
            a.then(script)
            overlaps.append((await client.ask(ask)).header(b"x-router-overlap-tokens"))
    assert overlaps == [b"0", b"0", b"8"]


@pytest.mark.parametrize("status", STATUSES)
async def test_a_lone_workers_5xx_is_passed_on_as_it_is(a: ScriptedWorker, status: int) -> None:
    a.then(answer(b'{"error":"theirs"}', status, b"retry-after: 3"))
    async with running(a) as router, router.client() as client:
        got = await client.ask(post())
    assert (got.status, got.body, got.header(b"retry-after")) == (status, b'{"error":"theirs"}', b"3")
    assert len(a.requests) == 1


@pytest.mark.parametrize("failing", BROKEN.values(), ids=BROKEN.keys())
async def test_a_lone_workers_failure_is_a_502(a: ScriptedWorker, failing: Script) -> None:
    a.then(failing)
    async with running(a) as router, router.client() as client:
        got = await client.ask(post())
        assert got.status == 502
        assert b'"type":"server_error"' in got.body
        assert (await client.ask(post())).status == 200
    assert len(a.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501, 504])
async def test_other_statuses_are_the_workers_last_word(a: ScriptedWorker, b: ScriptedWorker, status: int) -> None:
    a.then(answer(b'{"error":"theirs"}', status))
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post())
    assert (got.status, got.body) == (status, b'{"error":"theirs"}')
    assert (len(a.requests), len(b.requests)) == (1, 0)


async def test_a_pinned_request_is_not_sent_elsewhere(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(b"theirs", 500), drop, drop)  # the first drop may be that of a connection gone stale
    async with running(a, b) as router, router.client() as client:
        for status in (500, 502):
            got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"x-router-target-worker: a"))
            assert got.status == status
    assert b.requests == []


async def test_a_model_of_one_worker_is_not_sent_to_another(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.models, b.pages.models = ["one"], ["two"]
    a.then(drop)
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post(body=b'{"model":"one","prompt":"x"}'))
    assert got.status == 502
    assert b.requests == []


async def test_a_refused_connection_takes_the_worker_down_at_once(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b) as router, router.client() as client:
        await a.refuse()
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert not router.is_up(a)
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert router.samples("router_worker_failures_total") == {"a": 1}


async def test_a_connection_that_never_comes_about_is_given_up(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b, connect_timeout=0.5) as router, router.client() as client:
        await a.clog()
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert not router.is_up(a)


async def test_a_connection_reset_on_arrival(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b) as router, router.client() as client:
        a.reset_next = 1
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"
    assert a.requests == []


# -- connections used again


async def test_a_workers_connection_is_used_again(a: ScriptedWorker) -> None:
    a.then(answer(), events(b"1"), answer(b"no", 400), says(b"HTTP/1.1 204 No Content\r\n\r\n"))
    async with running(a) as router, router.client() as client:
        for _ in range(5):
            await client.ask(post())
    assert len({request.connection for request in a.requests}) == 1


@pytest.mark.parametrize(
    "last",
    [
        answer(b"{}", 200, b"connection: close"),
        says(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
        says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}excess"),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nexcess"),
    ],
    ids=["close", "HTTP/1.0", "excess", "excess after chunks"],
)
async def test_a_connection_that_cannot_go_on_is_not_used_again(a: ScriptedWorker, last: Script) -> None:
    a.then(last)
    async with running(a) as router, router.client() as client:
        assert (await client.ask(post())).body == b"{}"
        assert (await client.ask(post())).status == 200
    assert len({request.connection for request in a.requests}) == 2


@pytest.mark.parametrize("how", [drop, reset])
async def test_a_connection_closed_as_it_was_used_again_is_replaced_silently(
    a: ScriptedWorker, b: ScriptedWorker, how: Script
) -> None:
    target = b"x-router-target-worker: a"
    a.then(answer(), how, answer(b"fresh"))
    async with running(a, b) as router, router.client() as client:
        await client.ask(post("/v1/completions", b'{"prompt":"1"}', target))
        got = await client.ask(post("/v1/completions", b'{"prompt":"2"}', target))
        assert (got.status, got.body) == (200, b"fresh")
        assert router.total("router_worker_failures_total") == 0
    first, stale, fresh = a.requests
    assert first.connection == stale.connection != fresh.connection
    assert stale.body == fresh.body


async def test_a_fresh_connection_that_drops_too_is_the_workers_failure(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(), drop, drop)
    b.then(answer(), answer(b"b"))
    async with running(a, b) as router, router.client() as client:
        for _ in range(2):
            await client.ask(post())
        assert (await client.ask(post())).body == b"b"
    assert (len(a.requests), len(b.requests)) == (3, 2)


async def test_an_idle_connection_that_the_worker_closed_is_forgotten(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        await client.ask(post())
        pool = router.app._fleet.workers["a"].pool
        (dialogue,) = a.dialogues
        dialogue.drop()
        await until(lambda: not pool._open and not pool._idle)
        assert (await client.ask(post())).status == 200
    assert len(a.requests) == 2


async def test_a_worker_that_reads_slowly_keeps_nobody_else_waiting(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b) as router, router.client() as slow, router.client() as quick:
        a.reads = False
        slow.send(post(body=b'{"prompt":[' + b"7," * 4_000_000 + b"7]}"))
        await until(lambda: router.samples("router_load_requests").get("a") == 1)
        assert (await quick.ask(post())).header(b"x-router-worker") == b"b"
        slow.vanish()
        await until(lambda: not router.loads)


async def test_requests_at_a_time_have_connections_of_their_own(a: ScriptedWorker) -> None:
    a.then(never, answer(b"second"))
    async with running(a) as router, router.client() as first, router.client() as second:
        first.send(post())
        await until(lambda: a.requests)
        assert (await second.ask(post())).body == b"second"
        first.vanish()
        await asyncio.wait_for(a.dialogues[0].gone.wait(), PATIENCE)
    assert a.requests[0].connection != a.requests[1].connection


# -- down, and up again


async def test_a_worker_that_comes_back_serves_again(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b, health_interval=0.2) as router, router.client() as client:
        await a.refuse()
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"
        assert not router.is_up(a)
        await a.listen()
        await until(lambda: router.is_up(a))
        served = {(await client.ask(post())).header(b"x-router-worker") for _ in range(2)}
        assert served == {b"a", b"b"}


async def test_a_worker_comes_back_with_another_model(a: ScriptedWorker) -> None:
    async with running(a, health_interval=0.2) as router, router.client() as client:
        a.pages.statuses["/health"] = 503
        await until(lambda: not router.is_up(a))
        a.pages.models = ["other"]
        a.pages.statuses.clear()
        await until(lambda: router.is_up(a))
        assert (await client.ask(post(body=b'{"model":"other","prompt":"x"}'))).status == 200
        assert (await client.ask(post(body=b'{"model":"tiny","prompt":"x"}'))).status == 404


async def test_what_a_worker_has_in_flight_goes_on_when_its_health_fails(a: ScriptedWorker) -> None:
    async def script(dialogue: Dialogue) -> None:
        dialogue.events_head()
        dialogue.event(b"1")
        await dialogue.go_on.wait()
        dialogue.event(b"2")
        dialogue.end()

    a.then(script)
    async with running(a, health_interval=0.2) as router, router.client() as client:
        client.send(post())
        await client.head()
        a.pages.statuses["/health"] = 500
        await until(lambda: not router.is_up(a))
        a.go_on.set()
        assert await client.read_until(b"0\r\n\r\n") == b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/metrics", "/kv_event_sources"])
async def test_a_worker_that_holds_an_answer_back_holds_up_nobody(
    a: ScriptedWorker, b: ScriptedWorker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.FIRST_CHECK", 0.2)
    a.pages.statuses[path] = None
    async with running(a, b) as router, router.client() as client:
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"


async def test_a_router_without_file_descriptors_blames_no_worker(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b) as router, router.client() as client:
        assert (await client.ask(get("/health"))).status == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            got = await client.ask(post())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (got.status, b"Too many open files" in got.body) == (503, True)
        assert router.is_up(a)
        assert router.is_up(b)
        assert [(await client.ask(post())).status for _ in range(2)] == [200] * 2


class Breaks:
    """A policy with a fault."""

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        raise ZeroDivisionError


class BreaksLater:
    """The first choice is `policy`'s."""

    def __init__(self, policy: Policy) -> None:
        self._policies = [Breaks(), policy]

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        return self._policies.pop().choose(situation, random)


async def test_a_fault_of_the_router_itself_is_answered_and_nothing_stays_booked(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        scheduler = router.app._scheduler
        scheduler._policy, policy = Breaks(), scheduler._policy
        for path in ("/v1/completions", "/v1/embeddings"):
            assert (await client.ask(post(path))).status == 500
        scheduler._policy = policy
        assert (await client.ask(post())).status == 200
    assert len(a.requests) == 1


async def test_a_fault_of_the_router_itself_after_a_workers_failure_is_answered(
    a: ScriptedWorker, b: ScriptedWorker
) -> None:
    """Whichever way the worker fails: the router is told by its connection, or by a task of its own."""
    async with running(a, b) as router, router.client() as client:
        scheduler = router.app._scheduler
        policy = scheduler._policy

        async def fail(dialogue: Dialogue) -> None:
            scheduler._policy = Breaks()
            dialogue.drop()

        a.then(fail)
        b.then(fail)
        assert (await client.ask(post())).status == 500
        scheduler._policy = policy
        await a.refuse()
        await b.refuse()
        scheduler._policy = BreaksLater(policy)
        assert (await client.ask(post())).status == 500
