"""Two scripted workers behind one request: what each is sent, byte for byte, and what the client gets of their
answers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from router import housekeeping
from router.proxy.exchange import Exchange
from router.split import prefill_leg
from router.workers.breaker import FAILURES
from router.workers.spec import parse_worker
from tests.fakes.collector import Collector, attributes
from tests.fakes.raw_client import Answered, post
from tests.fakes.scripted_worker import (
    Dialogue,
    Pages,
    Script,
    ScriptedWorker,
    answer,
    drop,
    events,
    held_stream,
    never,
    says,
)
from tests.fakes.waiting import until
from tests.router.disaggregation.fleets import running
from tests.router.http.test_chunked import chunk
from tests.router.proxy.running import RunningRouter
from tests.router.scheduling.candidates import named
from tests.router.scheduling.predictions import prefill_factors

BODY = b'{"prompt": "hello", "max_tokens": 8}'
STREAMED = b'{"prompt": "hello", "max_tokens": 8, "stream": true}'
USAGE = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
PARAMS = b'{"remote_block_ids": [[1, 2]], "remote_port": 5600, "big": 123456789012345678901234567890, "e": "\\u00e9"}'
PREFILLED_AS = b'{"id":"x","usage":%%s,"kv_transfer_params":%s}' % PARAMS
PREFILLED = answer(PREFILLED_AS % json.dumps(USAGE).encode())
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def router_of(connector: str, *workers: ScriptedWorker, **settings: Any) -> AsyncIterator[RunningRouter]:
    """Workers named p… prefill, those named d… decode, others serve requests whole."""
    roles = {"p": "prefill", "d": "decode"}
    specs = tuple(
        parse_worker(f"{each.url},name={each.name},role={roles.get(each.name[0], 'both')},connector={connector}")
        for each in workers
    )
    async with running(specs, **settings) as router:
        yield router


@pytest.fixture
async def p() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("p", default=PREFILLED) as worker:
        yield worker


@pytest.fixture
async def d() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("d") as worker:
        yield worker


async def ask(router: RunningRouter, body: bytes = BODY, *headers: bytes, path: str = "/v1/completions") -> Answered:
    async with router.client() as client:
        return await client.ask(post(path, body, *headers))


def failures(router: RunningRouter) -> tuple[float, float]:
    """Of prefill and decode."""
    first, second = (router.total("router_pd_leg_failures_total", leg=leg) for leg in ("prefill", "decode"))
    return first, second


async def test_what_the_prefill_worker_answered_goes_to_the_decode_worker_as_it_is(
    p: ScriptedWorker, d: ScriptedWorker
) -> None:
    async with router_of("nixl", p, d) as router:
        got = await ask(router, BODY, b"x-request-id: mine")
    assert (got.status, got.header(b"x-router-worker"), got.header(b"x-router-prefill-worker")) == (200, b"d", b"p")
    assert got.header(b"x-request-id") == b"mine"
    first, second = p.requests[0], d.requests[0]
    (named,) = first.values(b"x-request-id")
    assert re.fullmatch(rb"mine\.[0-9a-f]{16}", named), "no other pair's, even if the client says the same twice"
    assert second.values(b"x-request-id") == [named]
    assert [each.values(b"content-length") for each in (first, second)] == [
        [b"%d" % len(each.body)] for each in (first, second)
    ]
    assert second.body == b'{"prompt":"hello","max_tokens":8,"kv_transfer_params":%s}' % PARAMS
    assert json.loads(first.body)["max_tokens"] == 1


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_answers_that_the_router_reads_are_not_compressed(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    """Whatever the client accepts: the one goes on to the other worker, and the other's cached tokens are corrected."""
    async with router_of(connector, p, d) as router:
        await ask(router, BODY, b"accept-encoding: gzip, br")
    asked = [worker.requests[0].values(b"accept-encoding") for worker in (p, d)]
    assert asked == [[b"identity"], [b"identity"]]


async def test_blocks_that_were_handed_over_are_counted(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with router_of("nixl", p, d, router_mode="kv") as router:
        await ask(router, b'{"prompt": "of thirteen ch"}')
        assert router.samples("router_kv_migrated_blocks_total") == {"d": 3}
        p.then(answer(b"{}", 400))
        await ask(router, b'{"prompt": "another one"}')
        d.then(drop, drop, drop)
        assert (await ask(router, b'{"prompt": "one more now"}')).status == 502
        assert router.samples("router_kv_migrated_blocks_total") == {"d": 3}


async def test_what_was_handed_over_is_counted_though_the_answer_begins_before_the_prefill_tells(
    p: ScriptedWorker, d: ScriptedWorker
) -> None:
    """Where both parts are sent at once, either may be first."""

    p.then(once_told(PREFILLED))
    d.then(held_stream)
    body = b'{"prompt": "of thirteen ch", "max_tokens": 8, "stream": true}'
    async with router_of("sglang", p, d, router_mode="kv") as router, router.client() as client:
        client.send(post(body=body))
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        p.go_on.set()
        await until(lambda: p.dialogues[0].finished)
        d.go_on.set()
        assert (await client.chunk())[1] == b"data: [DONE]\n\n"
        await until(lambda: router.total("router_pd_requests_total") == 1)
        assert router.samples("router_kv_migrated_blocks_total") == {"d": 3}
        assert router.total("router_pd_decode_seconds_count") == 1
        assert router.total("router_pd_transfer_seconds_count") == 0, "it did not begin after the first part's answer"


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_request_that_the_prefill_worker_refuses_is_refused(
    p: ScriptedWorker, d: ScriptedWorker, connector: str, status: int
) -> None:
    """Another would say the same; the decode worker is left, and what it may still say is heard by nobody."""

    async def wait_and_refuse(dialogue: Dialogue) -> None:
        await until(lambda: connector == "nixl" or d.requests)
        await answer(b'{"error":"theirs"}', status)(dialogue)

    p.then(wait_and_refuse)
    if connector != "nixl":
        d.then(never)
    async with router_of(connector, p, d) as router, router.client() as client:
        got = await client.ask(post(body=BODY))
        assert (got.status, got.body) == (status, b'{"error":"theirs"}')
        await until(lambda: all(dialogue.is_over for dialogue in d.dialogues))
        assert failures(router) == (0, 0)
        again = await client.ask(post(body=BODY))
        assert (again.status, again.body) == (200, b'{"ok":true}')
    assert len(p.requests) == 2


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize("status", [400, 503])
async def test_a_prefill_workers_own_error_ends_a_request_as_any_workers_does(
    p: ScriptedWorker, d: ScriptedWorker, connector: str, status: int
) -> None:
    """Else an alarm on requests that fail would rise with each client's mistake."""
    p.then(answer(b"{}", status))
    d.then(never)
    async with router_of(connector, p, d) as router:
        assert (await ask(router)).status == status
        assert router.total("router_requests_total") == 1
        assert router.total("router_requests_total", worker="p", status=str(status), end="complete") == 1


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_what_a_prefill_worker_says_beside_its_refusal(p: ScriptedWorker, d: ScriptedWorker, status: int) -> None:
    said = b"HTTP/1.1 %d No\r\ncontent-type: text/plain\r\nretry-after: 7\r\nserver: x\r\ncontent-length: 2\r\n\r\nno"
    p.then(says(said % status))
    async with router_of("nixl", p, d) as router:
        got = await ask(router, BODY, b"x-request-id: mine")
        assert (got.status, got.body) == (status, b"no")
        assert sorted(header for header in got.headers if header[0] != b"date") == [
            *((b"content-length", b"2"), (b"content-type", b"text/plain")),
            *((b"retry-after", b"7"), (b"x-request-id", b"mine"), (b"x-router-worker", b"p")),
        ]


@pytest.mark.parametrize("status", [400, 503])
async def test_a_prefill_workers_own_error_names_the_arm_as_any_workers_does(
    p: ScriptedWorker, d: ScriptedWorker, status: int
) -> None:
    p.then(answer(b"{}", status))
    async with router_of("nixl", p, d, ab="random:1,round-robin:1") as router:
        got = await ask(router)
        assert (got.status, got.header(b"x-router-worker")) == (status, b"p")
        assert got.header(b"x-router-arm") in {b"random", b"round-robin"}


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_a_prefill_worker_that_refuses_a_request_answers_again(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    """It is the probe of its breaker."""
    p.then(answer(b"{}", 400))
    d.then(never)
    async with router_of(connector, p, d) as router:
        fleet = router.app._fleet
        fleet.trip(fleet.workers["p"], "it was sick", 0.0)
        fleet.tick(10.0)
        assert router.breaker(p) == "half-open"
        assert (await ask(router)).status == 400
        assert router.breaker(p) == "closed"


@pytest.mark.parametrize("status", [429, 503, 400])
async def test_a_prefill_worker_that_refuses_a_prompt_is_not_thought_to_hold_it(
    p: ScriptedWorker, d: ScriptedWorker, status: int
) -> None:
    body = b'{"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    async with router_of("nixl", p, d, router_mode="kv") as router:
        overlaps = []
        for refusal in (answer(b"{}", status), PREFILLED, PREFILLED):
            p.then(refusal)
            overlaps.append((await ask(router, body)).header(b"x-router-overlap-tokens"))
    assert overlaps == [None, b"0", b"8"]


async def test_a_prefill_worker_that_nobody_can_follow_holds_the_prompt(p: ScriptedWorker, d: ScriptedWorker) -> None:
    body = b'{"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    p.then(once_told(PREFILLED))
    async with router_of("nixl", p, d, router_mode="kv") as router:
        fleet = router.app._fleet
        asked = asyncio.create_task(ask(router, body))
        await until(lambda: p.requests)
        fleet.mark_down(fleet.workers["d"], "gone")
        p.go_on.set()
        assert (await asked).status == 503
        fleet.mark_up(fleet.workers["d"])
        assert (await ask(router, body)).header(b"x-router-overlap-tokens") == b"8"


def once_told(script: Script) -> Script:
    """Not before the test says so."""

    async def waits(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await script(dialogue)

    return waits


waiting = once_told(answer())


BUSY = (429, 500, 502, 503)
FAILING: dict[str, Script] = {
    "dropped": drop,
    "cut in its body": says(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", then=Dialogue.drop),
    "no JSON": answer(b"<html>"),
    "no object": answer(b"[]"),
    "not UTF-8": answer(b"\xff{}"),
    "a stream": events(b"{}"),
    "aborted": answer(b'{"choices":[{"finish_reason":"abort"}],"kv_transfer_params":null}'),
    **{str(status): answer(b"{}", status) for status in (301, *BUSY)},
}


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize("name", FAILING)
async def test_a_prefill_that_fails_is_asked_of_another(
    p: ScriptedWorker, d: ScriptedWorker, name: str, connector: str
) -> None:
    failing, status = FAILING[name], next((busy for busy in BUSY if name == str(busy)), 502)
    async with ScriptedWorker("p2", default=PREFILLED) as other, router_of(connector, p, other, d) as router:
        for worker in (p, other):
            worker._default = failing
        d._default = waiting
        got = await ask(router)
        assert got.status == status, "the worker's own, if it said that it cannot now"
        assert failures(router) == (2, 0)
        other._default = PREFILLED
        d.go_on.set()
        got = await ask(router)
        assert (got.status, got.body) == (200, b'{"ok":true}')
        if connector == "nixl":  # else the decode worker may have answered before its prefill failed
            assert got.header(b"x-router-prefill-worker") == b"p2"
        assert failures(router)[1] == 0
        await until(lambda: all(dialogue.is_over for dialogue in d.dialogues[:-1]))


async def test_a_prefill_worker_may_not_fill_the_routers_memory(
    p: ScriptedWorker, d: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_leg, "MOST_BYTES", 1000)
    p._default = answer(b'{"kv_transfer_params":%s,"more":"%s"}' % (PARAMS, b"x" * 1000))
    async with ScriptedWorker("p2", default=PREFILLED) as other, router_of("nixl", p, other, d) as router:
        got = await ask(router)
        assert (got.status, got.header(b"x-router-prefill-worker")) == (200, b"p2")
        assert failures(router) == (1, 0)


@pytest.mark.parametrize("params", [b"null", b"[]", b'"x"', None])
async def test_a_prefill_worker_without_its_connector_is_said_so(
    p: ScriptedWorker, d: ScriptedWorker, params: bytes | None
) -> None:
    p.then(answer(b"{}" if params is None else b'{"kv_transfer_params":%s}' % params))
    async with router_of("nixl", p, d) as router:
        got = await ask(router)
    assert got.status == 502
    assert b"is it started with the connector" in got.body
    assert d.requests == []


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_a_decode_worker_that_cannot_be_reached(p: ScriptedWorker, d: ScriptedWorker, connector: str) -> None:
    """What was computed for it is used by another, where nobody was told of it yet."""
    async with ScriptedWorker("d2") as other, router_of(connector, p, d, other) as router:
        await d.refuse()
        await other.refuse()
        assert (await ask(router)).status == 502
        await other.listen()
        router.app._fleet.mark_up(router.app._fleet.workers["d"])
        router.app._fleet.mark_up(router.app._fleet.workers["d2"])
        before = len(p.requests)
        got = await ask(router)
        assert (got.status, got.header(b"x-router-worker")) == (200, b"d2")
        assert len(p.requests) - before in ({1} if connector == "nixl" else {1, 2})
        assert failures(router)[0] == 0


async def test_a_prefill_that_nobody_can_follow_is_not_its_workers_failure(
    p: ScriptedWorker, d: ScriptedWorker
) -> None:
    p.then(*[once_told(PREFILLED)] * 5)
    async with router_of("nixl", p, d) as router:
        asked = [asyncio.create_task(ask(router)) for _ in range(5)]
        await until(lambda: len(p.requests) == 5)
        router.app._fleet.mark_down(router.app._fleet.workers["d"], "gone")
        p.go_on.set()
        answers = await asyncio.gather(*asked)
        assert {got.status for got in answers} == {503}
        assert b"no decode worker is left" in answers[0].body
        assert failures(router) == (0, 0), "nobody failed a part"
        assert router.total("router_worker_failures_total") == 0
        assert router.breaker(p) == "closed"


async def test_an_answer_that_has_begun_may_take_longer_than_a_part(p: ScriptedWorker, d: ScriptedWorker) -> None:
    d.then(held_stream)
    loop, limit = asyncio.get_running_loop(), 0.5
    async with router_of("nixl", p, d, pd_timeout=limit) as router, router.client() as client:
        client.send(post("/v1/completions", STREAMED))
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        began = loop.time()
        await until(lambda: loop.time() > began + limit)
        d.go_on.set()
        assert (await client.chunk())[1] == b"data: [DONE]\n\n"
        assert failures(router) == (0, 0)


async def test_a_prompt_goes_on_where_it_fits_though_its_prefill_worker_drains_meanwhile(p: ScriptedWorker) -> None:
    body = json.dumps({"model": "tiny", "prompt": list(range(20)), "max_tokens": 8}).encode()
    p.then(once_told(PREFILLED))
    async with (
        ScriptedWorker("d1", Pages(max_model_len=16)) as short,
        ScriptedWorker("d2") as long,
        router_of("nixl", p, short, long, router_mode="kv") as router,
    ):
        asked = asyncio.create_task(ask(router, body))
        await until(lambda: len(p.requests) == 1)
        router.app._fleet.drain(router.app._fleet.workers["p"], True)
        p.go_on.set()
        assert (await asked).header(b"x-router-worker") == b"d2"
        assert (len(short.requests), len(long.requests)) == (0, 1)


async def test_a_decode_worker_that_takes_over_has_its_time_too(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with ScriptedWorker("d2", default=never) as other, router_of("nixl", p, d, other, pd_timeout=0.5) as router:
        await d.refuse()
        for _ in range(2):  # whichever is asked first
            got = await ask(router, STREAMED)
        assert got.status == 504
        assert len(other.requests) == 2


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_kept_connection_that_breaks_long_after_a_part_was_sent_was_not_too_old(
    p: ScriptedWorker, d: ScriptedWorker, leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.proxy.sending.STALE_WITHIN", 0.0)
    async with router_of("nixl", p, d) as router:
        assert (await ask(router)).status == 200
        {"prefill": p, "decode": d}[leg].then(drop)
        assert (await ask(router)).status == 502
        assert failures(router) == (leg == "prefill", leg == "decode")


@pytest.mark.parametrize("status", [400, 503])
async def test_how_long_a_prefill_takes_is_learned_from_answers_alone(
    p: ScriptedWorker, d: ScriptedWorker, status: int
) -> None:
    """An error comes at once, however long the prompt."""
    p.then(answer(b"{}", status))
    async with router_of("nixl", p, d, router_mode="kv") as router:
        latency, factors = router.app._scheduler.latency, []
        for _ in range(2):
            await ask(router)
            factors.append(prefill_factors(latency, named("p"), time.monotonic()).item())
    assert factors[0] == 1.0 != factors[1]


async def test_a_prompt_that_kills_whoever_computes_it(d: ScriptedWorker) -> None:
    async with (
        ScriptedWorker("p1", default=PREFILLED) as one,
        ScriptedWorker("p2", default=PREFILLED) as two,
        ScriptedWorker("p3", default=PREFILLED) as three,
        router_of("nixl", one, two, three, d, router_mode="least-loaded") as router,
    ):
        workers = (one, two, three)
        while not all(worker.requests for worker in workers):  # so that each has a connection to be used again
            assert (await ask(router)).status == 200
        for worker in workers:
            worker.then(worker.die, worker.die)
        before = sum(len(worker.requests) for worker in workers)
        assert (await ask(router)).status == 502
        assert sum(len(worker.requests) for worker in workers) == before + 2


async def test_an_answer_that_kills_whoever_makes_it(p: ScriptedWorker) -> None:
    """A worker that is gone when it is asked again was sent the request before."""
    async with (
        ScriptedWorker("d1") as one,
        ScriptedWorker("d2") as two,
        ScriptedWorker("d3") as three,
        router_of("nixl", p, one, two, three, router_mode="least-loaded") as router,
        router.client() as first,
        router.client() as second,
        router.client() as third,
    ):
        workers = (one, two, three)
        for worker in workers:
            worker.then(waiting)
        for client in (first, second, third):
            client.send(post(body=BODY))
        await until(lambda: all(worker.requests for worker in workers))
        for worker in workers:  # each has a connection to be used again
            worker.go_on.set()
            worker.then(worker.die, worker.die)
        for client in (first, second, third):
            assert (await client.answer()).status == 200
        assert (await ask(router)).status == 502
        assert sum(len(worker.requests) for worker in workers) == 3 + 2


async def test_a_stall_is_not_the_decode_workers_while_the_prompt_is_computed(
    d: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.02)
    async with (
        ScriptedWorker("p", default=never) as p,
        router_of("sglang", p, d, stall_timeout=0.1, pd_timeout=0.5) as router,
    ):
        d.then(never)
        assert (await ask(router, STREAMED)).status == 504
        assert failures(router) == (1, 0)


async def test_a_decode_worker_owes_its_answer_from_when_the_prompt_is_there(
    p: ScriptedWorker, d: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 60.0)
    p.then(waiting)
    d.then(never)
    async with router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=STREAMED))
        await until(lambda: p.requests and d.requests)
        (exchange,) = router.app._draining.exchanges
        computed = exchange.clock() + 1000
        assert exchange.silence(computed) is None
        p.go_on.set()
        await until(lambda: exchange.split and exchange.split.parted)
        silence = exchange.silence(computed + 1)
        assert silence
        assert (silence.worker.id, silence.since, silence.owed) == ("d", computed, "beginning")


async def test_a_decode_worker_that_has_begun_owes_the_rest_though_the_other_has_not_answered(
    d: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 60.0)
    d.then(says(SSE + b"9\r\ndata: 1\n\n\r\n"))
    async with ScriptedWorker("p", default=never) as p, router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=STREAMED))
        assert (await client.head()).status == 200
        (exchange,) = router.app._draining.exchanges
        silence = exchange.silence(exchange.clock())
        assert silence
        assert (silence.worker.id, silence.owed) == ("d", "rest")


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_a_prefill_worker_that_accepts_and_answers_nothing_is_kept_out(
    d: ScriptedWorker, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.02)
    async with (
        ScriptedWorker("p1", default=never) as stuck,
        ScriptedWorker("p2", default=PREFILLED) as other,
        router_of("nixl", stuck, other, d, router_mode="least-loaded", stall_timeout=0.5) as router,
    ):
        while not stuck.requests:
            assert (await ask(router, body)).status == 200
        assert router.breaker(stuck) == "open"
        assert router.is_up(stuck), "its health check still says that all is well"
        assert failures(router) == (1, 0)


@pytest.mark.parametrize(
    "framing", [b"", b"content-length: 29\r\n"], ids=["until the connection closes", "of a stated length"]
)
async def test_events_of_a_decode_worker_that_are_not_chunked(
    p: ScriptedWorker, d: ScriptedWorker, framing: bytes
) -> None:
    stream = b'data: {"a":1}\n\ndata: [DONE]\n\n'
    assert len(stream) == 29
    d.then(says(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%b\r\n" % framing, stream, then=Dialogue.drop))
    async with router_of("nixl", p, d) as router, router.client() as client:
        got = await client.ask(post(body=STREAMED))
        assert (got.status, got.body) == (200, stream)
        assert (got.header(b"transfer-encoding") is None) == bool(framing)
        assert (await client.ask(post(body=BODY))).status == 200  # nothing came after the answer


async def test_a_limit_of_tokens_beyond_any_number(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with router_of("nixl", p, d) as router:
        assert (await ask(router, b'{"prompt": "hello", "max_tokens": 1%b}' % (b"0" * 400))).status == 200


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_a_limit_of_tokens_below_0_is_for_the_engine_to_refuse(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    """No decode worker is late by it."""
    d.then(waiting)
    async with router_of(connector, p, d) as router, router.client() as client:
        client.send(post(body=b'{"prompt": "hello", "max_tokens": -100000}'))
        await until(lambda: d.requests)
        await until(lambda: not router.total("router_load_prefill_tokens"))
        for _ in range(3):
            await asyncio.sleep(0)
        d.go_on.set()
        assert (await client.answer()).status == 200
        assert failures(router) == (0, 0)


PUSHED = answer(
    b'{"kv_transfer_params":{"transfer_mode":"push","remote_engine_id":"e","remote_host":"h","remote_port":1,"tp_size":1}}'
)


@pytest.mark.parametrize("busy", ["p", "d"])
async def test_where_a_prefill_worker_is_stays_known_though_a_worker_is_busy(
    p: ScriptedWorker, d: ScriptedWorker, busy: str
) -> None:
    """Else the next request's parts would be sent one after the other, when there is most to do."""
    p._default = PUSHED
    async with router_of("nixl-push", p, d) as router, router.client() as client:
        assert (await client.ask(post(body=BODY))).status == 200
        {"p": p, "d": d}[busy].then(answer(b"{}", 503))
        assert (await client.ask(post(body=BODY))).status == 503
        p.then(once_told(PUSHED))
        client.send(post(body=b'{"prompt": "the next"}'))
        await until(lambda: any(b"the next" in request.body for request in d.requests))
        p.go_on.set()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_decode_worker_that_refuses_a_prompt_is_not_thought_to_hold_it(
    p: ScriptedWorker, d: ScriptedWorker, status: int
) -> None:
    body = b'{"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    async with router_of("nixl", p, d, router_mode="kv") as router:
        d.then(answer(b"{}", status))
        assert (await ask(router, body)).status == status
        assert not router.total("router_kv_migrated_blocks_total")
        assert (await ask(router, body)).status == 200
        assert router.samples("router_kv_migrated_blocks_total") == {"d": 2}


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_a_decode_worker_refuses_a_request(p: ScriptedWorker, d: ScriptedWorker, body: bytes) -> None:
    d.then(answer(b'{"error":"too long"}', 400))
    async with router_of("nixl", p, d) as router:
        got = await ask(router, body)
        assert (got.status, got.body) == (400, b'{"error":"too long"}')
        assert failures(router) == (0, 0)
        assert not router.total("router_pd_transfer_seconds_count")


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_lone_decode_workers_5xx_is_passed_on_and_counted(
    p: ScriptedWorker, d: ScriptedWorker, status: int
) -> None:
    d.then(answer(b'{"error":"theirs"}', status, b"retry-after: 3"))
    async with router_of("nixl", p, d, pd_timeout=5.0) as router:
        got = await ask(router)
        assert (got.status, got.body, got.header(b"retry-after")) == (status, b'{"error":"theirs"}', b"3")
        assert failures(router) == (0, 1)


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize("code", [400, 429, 500, 503])
async def test_a_stream_that_begins_with_a_decode_workers_error_counts_and_teaches_as_its_status_would(
    p: ScriptedWorker, d: ScriptedWorker, code: int, connector: str
) -> None:
    """Else transfers to a decode worker whose queue is full would seem the quickest."""
    d.then(events(b'{"error":{"object":"error","message":"The request queue is full.","code":%d}}' % code))
    async with router_of(connector, p, d, router_mode="kv") as router:
        got = await ask(router, STREAMED)
        assert (got.status, b'"error"' in got.body) == (200, True), "there is nobody else"
        assert failures(router) == (0, int(code != 400))
        assert router.total("router_requests_total") == 1
        assert router.total("router_requests_total", worker="d", status=str(code), end="complete") == 1
        for name in ("router_pd_requests_total", "router_pd_transfer_seconds_count", "router_kv_migrated_blocks_total"):
            assert router.total(name) == 0
        transfers = router.app._scheduler.disaggregation.transfers
        assert transfers.factors(np.array([True]), time.monotonic()).item() == 1.0


@pytest.mark.parametrize(("status", "prefills"), [(429, [0, 2]), (503, [0, 2]), (500, [1, 1])])
async def test_only_a_busy_decode_workers_prompt_is_computed_again_where_it_is_cached(
    p: ScriptedWorker, d: ScriptedWorker, status: int, prefills: list[int]
) -> None:
    """Others decode, as many as there are; another prefill worker would begin from nothing. But where the decode worker
    has failed, the KV may be to blame."""
    failing = answer(b'{"error":"theirs"}', status)
    d._default = failing
    async with (
        ScriptedWorker("p2", default=PREFILLED) as other,
        ScriptedWorker("d2", default=failing) as second,
        router_of("nixl", p, other, d, second, router_mode="kv") as router,
    ):
        got = await ask(router, b'{"prompt":%s}' % str(list(range(64))).encode())
        assert (got.status, got.body) == (status, b'{"error":"theirs"}')
        assert (len(d.requests), len(second.requests)) == (1, 1)
        assert sorted((len(p.requests), len(other.requests))) == prefills
        assert failures(router) == (0, 2)


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize(("code", "own"), [(400, True), (422, True), (500, False)])
async def test_an_error_that_is_the_requests_own_is_the_clients(
    p: ScriptedWorker, d: ScriptedWorker, code: int, own: bool, connector: str
) -> None:
    """As a status is: nobody else is asked, and nobody to blame."""
    error = b'{"error": {"message": "The \\"code\\": 500 is no grammar", "type": "BAD_REQUEST", "code": %d}}' % code
    d._default = events(error, b"[DONE]")
    async with ScriptedWorker("p2", default=PREFILLED) as other, router_of(connector, p, other, d) as router:
        got = await ask(router, STREAMED)
        assert (got.status, got.body) == (200, b"data: %b\n\ndata: [DONE]\n\n" % error)
        assert (failures(router) == (0, 0), len(d.requests) == 1) == (own, own)
        if own:
            for _ in range(FAILURES):
                await ask(router, STREAMED)
            assert {router.breaker(worker) for worker in (p, other, d)} == {"closed"}


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
@pytest.mark.parametrize("code", [429, 503])
async def test_a_decode_worker_that_says_only_in_its_stream_that_it_is_busy_is_not_taken_for_broken(
    p: ScriptedWorker, d: ScriptedWorker, code: int, connector: str
) -> None:
    d._default = events(b'{"error":{"object":"error","message":"The request queue is full.","code":%d}}' % code)
    async with ScriptedWorker("d2") as other, router_of(connector, p, d, other) as router:
        for _ in range(2 * FAILURES):
            assert (await ask(router, STREAMED)).body == b'{"ok":true}'
        assert len(d.requests) >= FAILURES
        assert failures(router) == (0, len(d.requests))
        assert router.breaker(d) == "closed"


ABORTED = {
    "/v1/completions": [b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}'],
    "/v1/chat/completions": [
        b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}',
    ],
}


@pytest.mark.parametrize("path", ABORTED)
async def test_a_decode_worker_that_is_told_to_stop_before_its_first_token(
    p: ScriptedWorker, d: ScriptedWorker, path: str
) -> None:
    aborted, whole = events(*ABORTED[path], b"[DONE]"), events(b'{"choices":[]}', b"[DONE]")
    body = STREAMED.replace(b'"prompt": "hello"', b'"messages": []') if "chat" in path else STREAMED
    async with ScriptedWorker("d2") as other, router_of("nixl", p, d, other) as router:
        d._default, other._default = aborted, whole
        for _ in range(2):  # whichever is asked first
            got = await ask(router, body, path=path)
            assert got.body == b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
        assert failures(router) == (0, len(d.requests))
        assert d.requests
        router.app._fleet.mark_down(router.app._fleet.workers["d2"], "gone")
        got = await ask(router, body, path=path)
        assert (got.status, b'"abort"' in got.body) == (200, True), "nobody else is there"


ROLE, TOKEN = chunk(b"data: %b\n\n" % ABORTED["/v1/chat/completions"][0]), chunk(b"data: 1\n\n")


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [(ROLE, TOKEN, [ROLE, TOKEN]), (TOKEN[:-2], TOKEN[-2:], [TOKEN])],
    ids=["role", "token"],
)
async def test_a_decode_workers_stream_is_passed_on_in_order_and_as_soon_as_it_says_something(
    p: ScriptedWorker, d: ScriptedWorker, first: bytes, second: bytes, shown: list[bytes]
) -> None:
    async def script(dialogue: Dialogue) -> None:
        dialogue.send(SSE + first)
        await dialogue.go_on.wait()
        dialogue.send(second)
        await dialogue.gone.wait()

    d.then(script)
    async with router_of("nixl", p, d) as router, router.client() as client:
        client.send(post(body=STREAMED))
        connections = router.app._fleet.workers["d"].pool._open
        await until(lambda: any(connection.latest == first for connection in connections))
        d.go_on.set()
        await client.head()
        assert [(await client.chunk())[0] for _ in shown] == shown
        client.vanish()


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_a_whole_answer_that_its_decode_worker_aborted_is_asked_for_again(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    d._default = aborted = answer(b'{"choices":[{"index":0,"text":"half of","finish_reason":"abort"}]}')
    async with ScriptedWorker("d2") as other, router_of(connector, p, d, other) as router, router.client() as client:
        for _ in range(2):  # whichever is asked first
            assert (await client.ask(post(body=BODY))).body == b'{"ok":true}'
        assert failures(router) == (0, len(d.requests))
        assert d.requests
        other._default = aborted
        got = await client.ask(post(body=BODY))
        assert (got.status, b'"abort"' in got.body) == (200, True), "there is nobody who would answer"


async def test_a_worker_that_serves_requests_whole_takes_over(p: ScriptedWorker, d: ScriptedWorker) -> None:
    """Its time is its own: the limit of a part is not for it."""

    p.then(once_told(answer(b"{}")))  # which nobody can follow
    async with (
        ScriptedWorker("b", default=waiting) as b,
        router_of("nixl", p, d, b, pd_timeout=0.5) as router,
        router.client() as client,
    ):
        fleet = router.app._fleet
        fleet.mark_down(fleet.workers["b"], "not yet")
        client.send(post(body=STREAMED))
        await until(lambda: p.requests)
        fleet.mark_up(fleet.workers["b"])
        p.go_on.set()
        await until(lambda: b.requests)
        assert b.requests[0].body == STREAMED
        (connection,) = router.app._clients.open
        exchange = connection._exchange
        assert isinstance(exchange, Exchange)
        assert exchange.split is None
        d.then(never)
        fleet.mark_down(fleet.workers["b"], "again")
        # So long a part may take, and the first request's is over by now.
        assert (await ask(router, STREAMED)).status == 504
        b.go_on.set()
        assert (await client.answer()).body == b'{"ok":true}'
        assert failures(router) == (1, 1)


async def test_a_prefill_that_fails_after_the_answer_began_is_counted_and_no_more(
    p: ScriptedWorker, d: ScriptedWorker
) -> None:
    p.then(once_told(drop))
    d.then(held_stream)
    async with router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=STREAMED))
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        p.go_on.set()
        await until(lambda: failures(router) == (1, 0))
        d.go_on.set()
        assert (await client.chunk())[1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_the_ends_of_both_legs_when_the_client_leaves(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    p.then(never)
    d.then(never)
    async with router_of(connector, p, d) as router, router.client() as client:
        client.send(post(body=BODY))
        await until(lambda: p.requests and (connector == "nixl" or d.requests))
        client.vanish()
        await until(lambda: all(dialogue.is_over for dialogue in [*p.dialogues, *d.dialogues]))
        assert failures(router) == (0, 0)


TOLD = b'{"usage":{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":%s}}}'


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
@pytest.mark.parametrize("cached", [b"40", b"null", b"0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_told_what_was_cached_where_its_prompt_was_computed(
    p: ScriptedWorker, d: ScriptedWorker, version: bytes, cached: bytes, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the prefill worker has told it."""
    monkeypatch.setattr("router.split.late_usage.PATIENCE", 3600.0)
    d.then(events(TOLD % cached, b"[DONE]") if stream else answer(TOLD % cached))
    async with router_of("nixl", p, d) as router, router.client() as client:
        request = post(body=STREAMED if stream else BODY).replace(b"HTTP/1.1", version)
        got = await client.ask(request)
        expected = TOLD % b"32"
        assert got.body == (b"data: %s\n\ndata: [DONE]\n\n" % expected if stream else expected)
        assert (got.header(b"transfer-encoding") == b"chunked") == (stream and version == b"HTTP/1.1")
        if got.header(b"content-length"):
            assert got.header(b"content-length") == b"%d" % len(got.body)
        assert router.samples("router_reported_cached_tokens_total") == ({} if cached == b"null" else {"p": 32})


async def test_a_zero_that_the_prefill_worker_leaves_out_is_told_too(p: ScriptedWorker, d: ScriptedWorker) -> None:
    """As vLLM before 0.24 does. The decode worker says how much of the prompt it was given."""
    left_out = PREFILLED_AS % b'{"prompt_tokens":40,"prompt_tokens_details":null}'
    for script in (answer(left_out), PREFILLED, answer(left_out), answer(PREFILLED_AS % b"null")):
        p.then(script)
        d.then(answer(TOLD % b"40"))
    async with router_of("nixl", p, d) as router:
        assert [(await ask(router)).body for _ in range(4)] == [TOLD % told for told in (b"40", b"32", b"0", b"40")]


async def test_an_old_client_gets_an_event_before_the_next_is_sent(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async def stream(dialogue: Dialogue) -> None:
        dialogue.events_head()
        dialogue.event(b"1")
        await dialogue.go_on.wait()
        dialogue.event(TOLD % b"40")
        dialogue.event(b"[DONE]")
        dialogue.end()

    d.then(stream)
    async with router_of("nixl", p, d) as router, router.client() as client:
        client.send(post(body=STREAMED).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await client.head()).header(b"transfer-encoding") is None
        assert await client.read_until(b"\n\n") == b"data: 1\n\n"
        d.go_on.set()
        assert await client.rest() == b"data: %b\n\ndata: [DONE]\n\n" % (TOLD % b"32")


waits_to_tell = once_told(PREFILLED)


LATE: dict[str, tuple[bytes, Script, bytes]] = {
    "whole": (BODY, answer(TOLD % b"40"), TOLD),
    "stream": (STREAMED, events(b"1", TOLD % b"40", b"[DONE]"), b"data: 1\n\ndata: " + TOLD + b"\n\ndata: [DONE]\n\n"),
}


@pytest.mark.parametrize("name", LATE)
async def test_usage_waits_for_what_the_prefill_worker_tells(
    p: ScriptedWorker, d: ScriptedWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are asked at once, and the second is done first. Its connection serves others meanwhile."""
    monkeypatch.setattr("router.split.late_usage.PATIENCE", 60.0)
    body, script, told = LATE[name]
    p.then(waits_to_tell)
    d.then(script)
    async with router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=body))
        await until(lambda: d.dialogues and d.dialogues[0].finished)
        assert (await ask(router)).body == b'{"ok":true}'
        assert router.total("router_requests_total") == 1
        p.go_on.set()
        assert (await client.answer()).body == told % b"32"
        assert router.samples("router_reported_cached_tokens_total") == {"p": 32}
        assert failures(router) == (0, 0)


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("fails", [True, False])
async def test_an_answer_that_is_whole_is_the_clients_though_its_prefill_never_tells(
    p: ScriptedWorker, d: ScriptedWorker, name: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.late_usage.PATIENCE", 60.0 if fails else 0.01)
    body, script, told = LATE[name]

    p.then(once_told(drop))
    d.then(script)
    async with router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=body))
        await until(lambda: d.dialogues and d.dialogues[0].finished)
        assert (await ask(router)).status == 200
        if fails:
            p.go_on.set()
        assert (await client.answer()).body == told % b"40"
        assert router.samples("router_reported_cached_tokens_total") == {}, "what was moved is no prefix hit of anybody"
        assert router.total("router_pd_requests_total") == 2
        assert failures(router) == (int(fails), 0)
        await until(lambda: p.dialogues[0].is_over)


@pytest.mark.parametrize("name", LATE)
async def test_an_answer_that_is_whole_waits_no_more_for_a_prefill_worker_that_refuses(
    p: ScriptedWorker, d: ScriptedWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.late_usage.PATIENCE", 60.0)
    body, script, told = LATE[name]

    p.then(once_told(answer(b"{}", 400)))
    d.then(script)
    async with router_of("sglang", p, d) as router, router.client() as client:
        client.send(post(body=body))
        await until(lambda: d.dialogues and d.dialogues[0].finished)
        assert (await ask(router)).status == 200
        p.go_on.set()
        got = await client.answer()
        assert (got.status, got.body) == (200, told % b"40")
        assert failures(router) == (0, 0)


async def test_what_is_said_of_requests_in_two_parts(p: ScriptedWorker, d: ScriptedWorker) -> None:
    p.then(answer(b"", 503))
    async with router_of("nixl", p, d) as router:
        assert (await ask(router)).status == 503
        assert router.total("router_pd_requests_total") == 0
        assert (await ask(router)).status == 200
        assert router.total("router_pd_requests_total") == 1
        assert router.total("router_pd_leg_failures_total", leg="prefill") == 1
        assert router.samples("router_worker_failures_total") == {"p": 1}
        timed = {name: router.total(f"router_pd_{name}_seconds_count") for name in ("prefill", "transfer", "decode")}
        assert timed == {"prefill": 1, "transfer": 0, "decode": 0}, "the first byte came with the last"
        d.then(events(b"1", b"[DONE]"))
        assert (await ask(router, STREAMED)).status == 200
        for name in ("prefill", "transfer", "decode"):
            assert router.total(f"router_pd_{name}_seconds_count") == timed[name] + 1


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_how_long_both_parts_took_is_told_and_learned(
    p: ScriptedWorker, d: ScriptedWorker, connector: str
) -> None:
    p.then(once_told(PREFILLED))
    d.then(once_told(events(b"1", b"[DONE]")))
    async with router_of(connector, p, d, router_mode="kv") as router:
        began = time.monotonic()
        asked = asyncio.create_task(ask(router, STREAMED))
        await until(lambda: p.requests)
        (exchange,) = router.app._draining.exchanges
        p.go_on.set()
        await until(lambda: exchange.split and exchange.split.parted)
        d.go_on.set()
        assert (await asked).status == 200
        prefill, transfer = (router.total(f"router_pd_{name}_seconds_sum") for name in ("prefill", "transfer"))
        assert min(prefill, transfer) > 0
        assert prefill + transfer < time.monotonic() - began
        transfers = router.app._scheduler.disaggregation.transfers
        assert transfers.factors(np.array([True]), time.monotonic()).item() != 1.0


async def test_workers_that_lack_their_others_are_named_at_the_start(
    p: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_of("nixl", p) as router:
        (said,) = [record for record in caplog.records if record.message == "A worker gets nothing to do"]
        assert "no worker that decodes" in str(said.__dict__)
        got = await ask(router)
        assert got.status == 503
        assert b"no worker that decodes" in got.body


async def test_a_whole_fleet_is_started_without_a_word(
    p: ScriptedWorker, d: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_of("nixl", p, d):
        assert "A worker gets nothing to do" not in caplog.messages


async def test_each_part_has_a_span(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with Collector() as collector:
        async with router_of("nixl", p, d, otlp_traces_endpoint=collector.url) as router:
            assert (await ask(router)).status == 200
        parts = {span.name: span for span in collector.spans}
    prefill, decode = parts["prefill worker"], parts["decode worker"]
    assert prefill.parent_span_id == decode.parent_span_id == parts["POST /v1/completions"].span_id
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano
    for worker, span in ((p, prefill), (d, decode)):
        assert attributes(span.attributes)["router.worker"] == worker.name
        (told,) = worker.requests[0].values(b"traceparent")
        assert told.decode().split("-")[2] == span.span_id.hex()
