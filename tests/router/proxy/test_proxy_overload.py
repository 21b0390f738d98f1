"""More than the workers are to have at a time: what clients are told, and that it clears by itself."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.app import BACKLOG
from router.http.front import Connection
from tests.fakes.raw_client import Answered, get, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, flood
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

BODY = b'{"model":"tiny","prompt":[1,2,3]}'


async def on_the_word(dialogue: Dialogue) -> None:
    """An answer when the test says so."""
    await dialogue.go_on.wait()
    dialogue.head(200, b"content-type: application/json", length=2)
    dialogue.send(b"{}")


def seen(router: RunningRouter) -> float:
    """Requests that it has taken up so far."""
    return router.total("router_requests_in_flight") + router.total("router_requests_total")


@asynccontextmanager
async def asking(router: RunningRouter, *requests: bytes) -> AsyncIterator[list[asyncio.Task[Answered]]]:
    """Each on a connection of its own, one after the other; all are answered by the end."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        asked, before = [], seen(router)
        for number, request in enumerate(requests, 1):
            client = await stack.enter_async_context(router.client())
            asked.append(group.create_task(client.ask(request)))
            await until(lambda: seen(router) == before + number)  # noqa: B023 -- waited for here
        yield asked


def error_of(answered: Answered) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answered.body)["error"]
    return error


def limits_of(router: RunningRouter) -> Any:
    return router.app._queue.limits


@pytest.fixture(params=["kv", "round-robin"])
def mode(request: pytest.FixtureRequest) -> str:
    made: str = request.param
    return made


async def test_a_full_queue_is_answered_with_429(a: ScriptedWorker, mode: str) -> None:
    a._default = on_the_word
    async with running(a, router_mode=mode, max_concurrency=1, max_queue=1) as router:
        async with asking(router, post(body=BODY), post(body=BODY)) as asked, router.client() as client:
            await until(lambda: len(a.requests) == 1 and router.total("router_queue_length") == 1)
            refused = await client.ask(post(body=BODY))
            assert refused.status == 429
            assert int(refused.header(b"retry-after") or 0) >= 1
            assert refused.header(b"x-request-id")
            error = error_of(refused)
            assert (error["code"], error["type"], error["held"]) == ("queue_full", "rate_limit_error", 1)
            assert "Try again in" in error["message"]
            assert router.total("router_queue_refused_total", reason="queue_full") == 1
            a.go_on.set()
        assert {answered.result().status for answered in asked} == {200}
        assert router.total("router_queue_wait_seconds_count") == 1
        async with router.client() as client:
            assert (await client.ask(post(body=BODY))).status == 200, "it has cleared by itself"
        await router.at_rest()
        assert router.total("router_queue_length") == 0


async def test_what_is_held_for_too_long_is_answered_with_408(a: ScriptedWorker, mode: str) -> None:
    a._default = on_the_word
    async with (
        running(a, router_mode=mode, max_worker_concurrency=1, queue_timeout=0.05) as router,
        router.client() as other,
        asking(router, post(body=BODY)),
    ):
        late = await other.ask(post(body=BODY))
        assert late.status == 408
        assert int(late.header(b"retry-after") or 0) >= 1
        error = error_of(late)
        assert (error["code"], error["type"], error["limit_seconds"]) == ("queue_timeout", "timeout_error", 0.05)
        assert router.total("router_queue_refused_total", reason="queue_timeout") == 1
        assert len(a.requests) == 1
        a.go_on.set()
        await until(lambda: router.total("router_requests_in_flight") == 0)
        assert (await other.ask(post(body=BODY))).status == 200, "on the same connection"


async def test_the_limit_per_worker_holds_for_those_who_name_it_too(a: ScriptedWorker, b: ScriptedWorker) -> None:
    for worker in (a, b):
        worker._default = on_the_word
    pinned = post("/v1/completions", BODY, b"X-Router-Target-Worker: a")
    async with running(a, b, max_worker_concurrency=1) as router:
        async with asking(router, pinned, pinned, post(body=BODY), post("/v1/embeddings", BODY)):
            await until(lambda: router.total("router_queue_length") == 2)
            assert [len(worker.requests) for worker in (a, b)] == [1, 1]
            b.go_on.set()
            await until(lambda: len(b.requests) == 2)
            assert len(a.requests) == 1
            a.go_on.set()
        assert [len(worker.requests) for worker in (a, b)] == [2, 2]


async def test_limits_hold_as_soon_as_they_are_set(a: ScriptedWorker) -> None:
    a._default = on_the_word
    async with running(a) as router:
        async with asking(router, *[post(body=BODY)] * 2):
            await until(lambda: len(a.requests) == 2)
            limits_of(router).max_concurrency = 2
            async with asking(router, *[post(body=BODY)] * 2):
                await until(lambda: router.total("router_queue_length") == 2)
                assert len(a.requests) == 2
                limits_of(router).max_concurrency = 3
                router.app._queue.wake()
                await until(lambda: len(a.requests) == 3)
                assert router.total("router_queue_length") == 1
                a.go_on.set()
        assert len(a.requests) == 4


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(a: ScriptedWorker) -> None:
    a._default = on_the_word
    async with running(a, max_concurrency=1, tenant_header="X-Tenant") as router:
        flood = [post("/v1/completions", b'{"prompt":"flood"}', b"x-tenant: flood")] * 6
        async with asking(router, *flood):
            await until(lambda: router.total("router_queue_length") == 5)
            other = post("/v1/completions", b'{"prompt":"other"}', b"X-TENANT: other")
            async with asking(router, other):
                await until(lambda: router.total("router_queue_length") == 6)
                a.go_on.set()
    order = [json.loads(request.body)["prompt"] for request in a.requests]
    assert order.index("other") <= 2
    assert not [name for request in a.requests for name, _ in request.headers if name == b"x-tenant"]


async def test_a_client_that_leaves_while_it_is_held_gives_its_place_to_another(a: ScriptedWorker) -> None:
    a._default = on_the_word
    async with running(a, max_concurrency=1, max_queue=1) as router, asking(router, post(body=BODY)):
        async with router.client() as leaving:
            leaving.send(post(body=BODY))
            await until(lambda: router.total("router_queue_length") == 1)
        await until(lambda: router.total("router_queue_length") == 0)
        async with asking(router, post(body=BODY)):
            await until(lambda: router.total("router_queue_length") == 1)
            a.go_on.set()


async def test_503_is_for_when_nobody_serves_not_for_when_all_are_busy(a: ScriptedWorker) -> None:
    a._default = on_the_word
    async with running(a, max_concurrency=1) as router:
        async with asking(router, post(body=BODY), post(body=BODY)), router.client() as client:
            await until(lambda: router.total("router_queue_length") == 1)
            assert (await client.ask(get("/ready"))).status == 200
            a.go_on.set()
        (worker,) = router.app._fleet.workers.values()
        router.app._fleet.mark_down(worker, "test")
        async with router.client() as client:
            assert (await client.ask(post(body=BODY))).status == 503


# -- slow clients


def connection_of(router: RunningRouter) -> Connection:
    (connection,) = router.app._clients.open
    return connection


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_and_its_worker_let_go(a: ScriptedWorker) -> None:
    a.then(flood(48 * 2**20))
    async with running(a) as router, router.client(receive_buffer=4096, limit=4096) as client:
        client.send(post("/v1/files", b"{}"))
        await client.head()
        connection = connection_of(router)
        await until(lambda: connection._paused)
        (dialogue,) = a.dialogues
        connection.tick(1000.0)
        connection.tick(1000.0 + router.app._settings.client_timeout)
        await until(lambda: dialogue.is_over)
        assert router.total("router_clients_refused_total", cause="slow_answer") == 1
        assert router.total("router_requests_total", end="cancelled") == 1
        await until(lambda: not router.total("router_client_connections"))


async def test_a_request_that_does_not_come_whole_is_answered_with_408(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        client.send(post(body=BODY)[:-1])
        await until(lambda: router.total("router_client_connections") == 1)
        connection = connection_of(router)
        await until(lambda: connection._activity().what == "sending")
        connection.tick(1000.0)
        connection.tick(1000.0 + router.app._settings.client_timeout)
        late = await client.answer()
        assert (late.status, error_of(late)["type"], late.header(b"connection")) == (408, "timeout_error", b"close")
        assert await client.rest() == b""
        assert router.total("router_clients_refused_total", cause="slow_request") == 1
    assert not a.requests


async def test_a_connection_too_many_is_told_so(a: ScriptedWorker) -> None:
    async with running(a, max_connections=1) as router, router.client() as first:
        assert (await first.ask(post(body=BODY))).status == 200
        async with router.client() as second:
            answered = await second.answer()
            assert (answered.status, answered.header(b"connection")) == (503, b"close")
        await until(lambda: router.total("router_client_connections") == 1)
        assert (await first.ask(post(body=BODY))).status == 200
        first.leave()
        await until(lambda: not router.total("router_client_connections"))
        async with router.client() as third:
            assert (await third.ask(post(body=BODY))).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket does not tell")
async def test_as_many_connections_may_wait_to_be_accepted_as_the_system_allows(a: ScriptedWorker) -> None:
    """A burst of thousands comes within one turn of the loop."""
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())  # noqa: ASYNC240 -- no disk is read
    async with running(a) as router:
        assert router.app._server
        told = router.app._server.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    (most,) = struct.unpack_from("I", told, 28)  # of a listening socket, `tcpi_sacked` means this
    assert most == min(BACKLOG, allowed)


async def test_bodies_beyond_what_may_be_held_are_answered_with_429(a: ScriptedWorker) -> None:
    a._default = on_the_word
    large = b'{"model":"tiny","prompt":"%s"}' % (b"x" * 2**20)
    async with running(a, max_buffered=2**20 + 2**19) as router, router.client() as one, router.client() as two:
        first = asyncio.ensure_future(one.ask(post(body=large)))
        await until(lambda: a.requests)
        assert router.total("router_buffered_bytes") == len(large)
        refused = await two.ask(post(body=large))
        assert (refused.status, refused.header(b"retry-after")) == (429, b"1")
        assert router.total("router_clients_refused_total", cause="max_buffered") == 1
        a.go_on.set()
        assert (await first).status == 200
        assert router.total("router_buffered_bytes") == 0
        async with router.client() as three:
            assert (await three.ask(post(body=large))).status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_could_never_be_held_is_too_large(a: ScriptedWorker, chunked: bool) -> None:
    """429 would have its client try again for ever."""
    large = b"x" * (2**20 + 1)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(large)
    async with running(a, max_buffered=2**20) as router, router.client() as client:
        client.send(head + large if chunked else post(body=large))
        got = await client.answer()
        assert (got.status, got.header(b"retry-after")) == (413, None)
        assert "1048576 bytes (--max-buffered)" in error_of(got)["message"]
        assert router.total("router_clients_refused_total", cause="max_buffered") == 0


async def test_all_connections_are_looked_at_now_and_then(a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.housekeeping.INTERVAL", 0.01)
    async with running(a, keep_alive_timeout=0.02) as router, router.client() as client:
        assert (await client.ask(post(body=BODY))).status == 200
        assert await client.rest() == b"", "closed, and nothing sent"
