"""How requests end when something goes wrong: broken streams, slow clients, clients that vanish at any moment. Whatever
the ending, `running` proves that no load and no task is left."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from router import housekeeping
from router.app import App
from tests.fakes.raw_client import PATIENCE, RawClient, error_of, get, post
from tests.fakes.scripted_worker import Dialogue, Script, ScriptedWorker, answer, drop, flood, never
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

BODY = b'{"prompt":"x","stream":true}'
EVENTS = b"content-type: text/event-stream\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


WHOLE = chunk(b"data: 1\n\n")


def in_two(first: bytes, last: bytes, how: Callable[[Dialogue], None]) -> Script:
    """The last part, and the end, once the worker is told to go on: the client has the first part by then."""

    async def script(dialogue: Dialogue) -> None:
        dialogue.send(first)
        await dialogue.go_on.wait()
        dialogue.send(last)
        how(dialogue)

    return script


# -- streams that break


async def test_a_stream_that_breaks_after_its_last_event_is_whole(a: ScriptedWorker) -> None:
    a.then(in_two(OK + EVENTS + CHUNKED + b"\r\n" + WHOLE, chunk(b"data: [DONE]\n\n"), Dialogue.drop))
    async with running(a) as router, router.client() as client:
        client.send(post(body=BODY))
        await client.head()
        await client.chunk()
        a.go_on.set()
        assert (await client.chunk())[1] == b"data: [DONE]\n\n"
        assert (await client.chunk())[1] == b""
        assert router.total("router_requests_total", end="complete") == 1


@pytest.mark.parametrize(
    "sent",
    [
        WHOLE,
        WHOLE + b"9\r\nda",
        WHOLE + b"9",
        WHOLE + chunk(b"data: 2\n\n")[:-1],
        WHOLE + chunk(b"data: half an ev"),
        WHOLE + b"not a chunk\r\n",
        WHOLE * 100 + b"0\r\n",
    ],
)
async def test_a_broken_event_stream_ends_in_an_error_event(a: ScriptedWorker, b: ScriptedWorker, sent: bytes) -> None:
    a.then(in_two(OK + EVENTS + CHUNKED + b"\r\n" + WHOLE, sent, Dialogue.drop))
    async with running(a, b) as router, router.client() as client:
        client.send(post(body=BODY))
        await client.head()
        _, got = await client.chunk()
        a.go_on.set()
        while True:
            _, content = await client.chunk()
            if not content:
                break
            got += content
        *whole, last, nothing = got.split(b"\n\n")
        assert nothing == b""
        assert set(whole) == {b"data: 1"}
        told, _, name = last.removeprefix(b"data: ").partition(b"\n")
        assert (json.loads(told)["error"]["code"], name) == (502, b"event: error")
        assert (await client.ask(post())).header(b"x-router-worker") == b"b"  # and nothing came after it
        assert router.samples("router_retries_total") == {}
        assert router.total("router_requests_total", end="broken") == 1
    assert len(b.requests) == 1


PING = chunk(b'event: ping\ndata: {"type":"ping"}\n\n')


@pytest.mark.parametrize(("first", "last"), [(PING, PING * 3), (chunk(b": no event\n\n"), b"")])
async def test_a_broken_stream_of_messages_ends_in_an_event_that_is_named_error(
    a: ScriptedWorker, first: bytes, last: bytes
) -> None:
    """Clients of /v1/messages know events by their names, also if there was none yet."""
    a.then(in_two(OK + EVENTS + CHUNKED + b"\r\n" + first, last, Dialogue.drop))
    async with running(a) as router, router.client() as client:
        client.send(post("/v1/messages", BODY))
        await client.head()
        a.go_on.set()
        contents = [content async for content in rest_of(client)]
    name, _, data = contents[-1].partition(b"\n")
    told = json.loads(data.removeprefix(b"data: "))
    assert (name, told["type"], told["error"]["code"]) == (b"event: error", "error", 502)


async def test_a_broken_stream_of_responses_ends_in_an_error_with_the_next_number(a: ScriptedWorker) -> None:
    """Clients of /v1/responses that check the form of events take one without a number for none at all."""
    created, delta = (
        chunk(b'event: response.x\ndata: {"type":"response.x","sequence_number":%d}\n\n' % number) for number in (0, 1)
    )
    a.then(in_two(OK + EVENTS + CHUNKED + b"\r\n" + created, delta, Dialogue.drop))
    async with running(a) as router, router.client() as client:
        client.send(post("/v1/responses", BODY))
        await client.head()
        await client.chunk()
        a.go_on.set()
        contents = [content async for content in rest_of(client)]
    name, _, data = contents[-1].partition(b"\n")
    told = json.loads(data.removeprefix(b"data: "))
    assert (name, told["type"], told["sequence_number"]) == (b"event: error", "error", 2)
    assert told["message"] == told["error"]["message"]


async def rest_of(client: RawClient) -> AsyncIterator[bytes]:
    """The contents of the chunks that are left."""
    while True:
        _, content = await client.chunk()
        if not content:
            return
        yield content


async def test_an_event_stream_of_unknown_length_ends_in_an_error_event_too(a: ScriptedWorker) -> None:
    a.then(in_two(OK + EVENTS + b"\r\n" + b"data: 1\n\n", b"", Dialogue.reset))
    async with running(a) as router, router.client() as client:
        client.send(post(body=BODY))
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        a.go_on.set()
        assert b'"error"' in (await client.chunk())[1]
        assert (await client.chunk())[1] == b""


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (OK + b"content-length: 100\r\n\r\nabc", b"def"),
        (OK + CHUNKED + b"\r\n" + chunk(b"abc"), b""),
        (OK + CHUNKED + b"\r\n" + chunk(b"abc"), b"zzz\r\n"),
        (OK + EVENTS + b"content-length: 100\r\n\r\ndata: 1\n\nabc", b"data: 2\n\n"),
    ],
)
async def test_any_other_broken_answer_breaks_the_connection(a: ScriptedWorker, first: bytes, last: bytes) -> None:
    a.then(in_two(first, last, Dialogue.drop))
    async with running(a) as router, router.client() as client:
        client.send(post())
        await client.read_until(b"abc")
        a.go_on.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()
        await until(lambda: not router.loads)
        assert router.total("router_requests_total", end="broken") == 1


async def test_a_broken_answer_to_an_old_client_breaks_the_connection(a: ScriptedWorker) -> None:
    """An orderly end of the connection would mean that the answer is whole."""
    a.then(in_two(OK + b"\r\nabc", b"", Dialogue.reset))
    async with running(a) as router, router.client() as client:
        client.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY))
        await client.read_until(b"abc")
        a.go_on.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n"])
async def test_an_old_client_gets_an_event_before_the_next_is_sent(a: ScriptedWorker, header: bytes) -> None:
    """Such as a proxy between us and a browser; and it is told in an event that the stream broke. The end is where the
    connection ends, whatever the client would like."""
    a.then(in_two(OK + EVENTS + CHUNKED + b"\r\n" + WHOLE, chunk(b"data: 2\n\n"), Dialogue.drop))
    async with running(a) as router, router.client() as client:
        head = b"POST /v1/completions HTTP/1.0\r\n%scontent-length: %d\r\n\r\n" % (header, len(BODY))
        client.send(head + BODY)
        await client.head()
        assert await client.read_until(b"\n\n") == b"data: 1\n\n"
        a.go_on.set()
        assert (await client.rest()).startswith(b'data: 2\n\ndata: {"error":')


# -- slow clients


async def test_a_slow_client_slows_its_worker(a: ScriptedWorker) -> None:
    """Or the router would hold what the client does not take."""
    size = 64 * 2**20
    a.then(flood(size))
    async with running(a) as router, router.client(receive_buffer=4096, limit=4096) as client:
        client.send(post("/v1/files", b"{}"))
        await client.head()
        (dialogue,) = a.dialogues
        await _stalled(dialogue)
        assert dialogue.sent < size  # sockets' buffers take some
        (connection,) = router.app._clients.open
        assert connection._transport.get_write_buffer_size() < 2**20
        left = size
        while left:
            left -= len(await client.read_exactly(min(left, 2**20)))
        assert (await client.ask(post())).status == 200


async def _stalled(dialogue: Dialogue) -> None:
    """Until the socket has taken nothing for a while."""
    before = -1
    while before != dialogue.sent:
        before = dialogue.sent
        await asyncio.sleep(0.1)  # that nothing happens can only be seen in time


async def test_a_client_that_takes_little_at_a_time_is_not_cut_off(
    a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes megabytes of its answer, and asks for more long after the client has begun to take those."""
    monkeypatch.setattr(housekeeping, "INTERVAL", 3600.0)  # the test tells the time
    a.then(flood(48 * 2**20))
    async with running(a) as router, router.client(receive_buffer=4096, limit=4096) as client:
        client.send(post())
        await client.head()
        await _stalled(a.dialogues[0])
        clients = router.app._clients
        for times in range(20):
            await client.read_exactly(100_000)
            await clients.tick(20.0 * times)
        assert clients.refused == {}
        await clients.tick(20.0 * times + 60.0)  # it has taken nothing since
        assert clients.refused == {"slow_answer": 1}


@pytest.mark.parametrize("size", [200_000, 1_000_000, 3_000_000])
async def test_a_connection_works_on_after_a_client_that_was_slow(a: ScriptedWorker, size: int) -> None:
    """The end of an answer may come in the very piece that fills the client's buffer."""

    async def script(dialogue: Dialogue) -> None:
        dialogue.head(200, length=size)
        dialogue.send(b"x" * size)

    async with running(a) as router:
        for _ in range(4):
            a.then(script, answer(b"next"))
            async with router.client(receive_buffer=4096, limit=4096) as slow, router.client() as quick:
                slow.send(post())
                await slow.head()
                await slow.read_exactly(size)
                assert (await quick.ask(post())).body == b"next"
    assert len({request.connection for request in a.requests}) == 1


async def test_a_silent_connection_is_kept_in_mind_by_what_is_between(a: ScriptedWorker) -> None:
    """Firewalls forget it after some minutes, and a host that is gone would never show."""
    a.then(never)
    async with running(a) as router, router.client() as client:
        client.send(post())
        await until(lambda: bool(a.requests))
        (towards_client,) = router.app._clients.open
        (towards_worker,) = router.app._fleet.workers["a"].pool._open
        for connection in (towards_client, towards_worker):
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


async def test_a_slow_client_that_asks_ahead_is_answered_one_by_one(a: ScriptedWorker) -> None:
    """What it has not taken of the first answer must not be joined by the second."""
    size = 24 * 2**20
    a.then(flood(size), flood(size))
    async with running(a) as router, router.client(receive_buffer=4096, limit=4096) as client:
        client.send(post() * 2)
        for number in (1, 2):
            await client.head()
            if number == 2:
                await _stalled(a.dialogues[1])
                (connection,) = router.app._clients.open
                assert connection._transport.get_write_buffer_size() < 2**20
            left = size
            while left:
                # Stops short of the first answer's end while the second would be piling up behind it.
                left -= len(await client.read_exactly(min(left, 2**20)))
                if number == 1 and left == 2**20:
                    await _stalled(a.dialogues[-1])


async def test_draining_waits_until_a_slow_client_has_it_all(a: ScriptedWorker) -> None:
    body = b"x" * 60_000
    a.then(answer(body))
    async with running(a) as router, router.client(receive_buffer=4096, limit=4096) as client:
        await client.ask(get("/health"))
        (connection,) = router.app._clients.open
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.send(post())
        await until(lambda: router.total("router_requests_total", end="complete") == 1)
        assert connection._transport.get_write_buffer_size() > 0
        draining = asyncio.ensure_future(router.app.drain(PATIENCE))
        assert (await client.answer()).body == body
        assert await client.rest() == b""
        await draining


# -- clients that vanish

Moment = Callable[[RunningRouter, RawClient, ScriptedWorker, ScriptedWorker], Awaitable[None]]


async def in_its_head(router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker) -> None:
    client.send(post(body=BODY)[:20])
    await until(lambda: router.app._clients.open)


async def in_its_body(router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker) -> None:
    client.send(post(body=BODY)[:-3])
    await until(lambda: router.app._clients.open)


async def tokenizing(router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.statuses["/tokenize"] = b.pages.statuses["/tokenize"] = None
    client.send(post(body=BODY))
    await until(lambda: a.held.is_set() or b.held.is_set())


async def connecting(router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker) -> None:
    await a.clog()
    client.send(post(body=BODY))
    await until(lambda: router.total("router_load_requests", worker="a") == 1)


async def connecting_after_a_failure(
    router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker
) -> None:
    await b.clog()
    a.then(answer(b"", 500))
    client.send(post(body=BODY))
    await until(lambda: router.total("router_load_requests", worker="b") == 1)


async def connecting_again_after_a_stale_connection(
    router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker
) -> None:
    target = b"x-router-target-worker: a"
    await client.ask(post("/v1/completions", BODY, target))

    async def close_for_good(dialogue: Dialogue) -> None:
        await a.clog()

    a.then(close_for_good)
    client.send(post("/v1/completions", BODY, target))
    await until(lambda: len(a.requests) == 2 and a.dialogues[1].is_over)
    pool = router.app._fleet.workers["a"].pool
    await until(lambda: not pool._open)


def at(*pieces: bytes, client_sees: bytes = b"", failing: Script | None = None) -> Moment:
    """When the worker (the second, if the first is `failing`) has sent `pieces`, and the client has what it sees."""

    async def moment(router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker) -> None:
        async def script(dialogue: Dialogue) -> None:
            for piece in pieces:
                dialogue.send(piece)
                await asyncio.sleep(0.001)  # so that the pieces travel one by one
            said.set()
            await never(dialogue)

        said = asyncio.Event()
        a.then(failing or script)
        b.then(script)
        client.send(post(body=BODY))
        await asyncio.wait_for(said.wait(), PATIENCE)
        if client_sees:
            await client.read_until(client_sees)

    return moment


async def while_it_reads_nothing(
    router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker
) -> None:
    a.then(flood(48 * 2**20))
    client.send(post(body=BODY))
    await until(lambda: a.dialogues and a.dialogues[0].sent)
    await _stalled(a.dialogues[0])


async def with_more_requests_waiting(
    router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker
) -> None:
    a.then(never)
    client.send(post(body=BODY) * 3)
    await until(lambda: a.requests)


async def after_answers_of_the_routers_own(
    router: RunningRouter, client: RawClient, a: ScriptedWorker, b: ScriptedWorker
) -> None:
    """Requests waiting behind one another, of which some are answered at once."""
    a.then(answer())
    b.then(never)
    client.send(post(body=BODY) + get("/health") + post(body=BODY))
    await until(lambda: b.requests)


HEAD = OK + EVENTS + CHUNKED + b"\r\n"
MOMENTS: dict[str, Moment] = {
    "in its head": in_its_head,
    "in its body": in_its_body,
    "while the prompt is tokenised": tokenizing,
    "connecting": connecting,
    "connecting to a second worker": connecting_after_a_failure,
    "connecting again after a stale connection": connecting_again_after_a_stale_connection,
    "waiting": at(),
    "after 100": at(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "in the head": at(OK + EVENTS),
    "after the head": at(HEAD),
    "in a chunk's size": at(HEAD, b"1"),
    "in the first event": at(HEAD, WHOLE[:5]),
    "after the first event": at(HEAD, WHOLE, client_sees=WHOLE),
    "in the second event": at(HEAD, WHOLE, WHOLE[:5], client_sees=WHOLE),
    "before the last chunk": at(HEAD, WHOLE, chunk(b"data: [DONE]\n\n"), client_sees=b"[DONE]\n\n\r\n"),
    "in the last chunk": at(HEAD, WHOLE, b"0\r\n", client_sees=WHOLE),
    "in a body with a length": at(OK + b"content-length: 9\r\n\r\n1234", client_sees=b"1234"),
    "in a body without a length": at(OK + b"\r\n1234", client_sees=b"1234"),
    "in an error's body": at(b"HTTP/1.1 404 No\r\ncontent-length: 9\r\n\r\n1234", client_sees=b"1234"),
    "waiting for a second worker": at(failing=drop),
    "waiting for a second worker after a 503": at(failing=answer(b"", 503)),
    "in a second worker's stream": at(HEAD, WHOLE, client_sees=WHOLE, failing=drop),
    "while it reads nothing": while_it_reads_nothing,
    "with more requests waiting": with_more_requests_waiting,
    "after answers of the router's own": after_answers_of_the_routers_own,
}


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
async def test_a_client_vanishes(a: ScriptedWorker, b: ScriptedWorker, moment: Moment, how: str) -> None:
    mode = "kv" if moment is tokenizing else "round-robin"
    async with running(a, b, router_mode=mode) as router:
        async with router.client(receive_buffer=4096, limit=4096) as client:
            await moment(router, client, a, b)
            if how == "reset":
                client.vanish()
            else:
                client.leave()
            await until(lambda: not router.app._clients.open)
        await until(lambda: not router.loads)
        for worker in (a, b):
            for dialogue in worker.dialogues:
                if not dialogue.finished:
                    await asyncio.wait_for(dialogue.gone.wait(), PATIENCE)
        # The rest of the house is in order: the next client is served, by a worker that still is one.
        for worker in (a, b):
            await worker.refuse()
            await worker.listen()
            worker.behave()
        async with router.client() as client:
            assert (await client.ask(post())).status == 200


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
async def test_the_router_is_stopped(a: ScriptedWorker, b: ScriptedWorker, moment: Moment) -> None:
    """At each of the same moments: nobody waits for what takes for ever, and nothing is left."""
    mode = "kv" if moment is tokenizing else "round-robin"
    async with running(a, b, router_mode=mode) as router, router.client(receive_buffer=4096, limit=4096) as client:
        await moment(router, client, a, b)
        app: App = router.app
        await app.drain(0)
        await until(lambda: not app._clients.open)
        assert not router.loads
        for dialogue in a.dialogues + b.dialogues:
            if not dialogue.finished:
                await asyncio.wait_for(dialogue.gone.wait(), PATIENCE)


async def test_draining_lets_a_stream_end(a: ScriptedWorker) -> None:
    a.then(in_two(HEAD + WHOLE, WHOLE + b"0\r\n\r\n", lambda _: None))
    async with running(a) as router, router.client() as busy, router.client() as idle:
        await idle.ask(get("/health"))
        busy.send(post(body=BODY))
        await busy.head()
        await busy.chunk()
        draining = asyncio.ensure_future(router.app.drain(PATIENCE))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await router.client().__aenter__()
        a.go_on.set()
        assert await busy.rest() == WHOLE + b"0\r\n\r\n"
        await draining


async def test_draining_waits_for_a_request_that_is_being_sent(a: ScriptedWorker) -> None:
    whole = post(body=BODY)
    async with running(a) as router, router.client() as sending, router.client() as never_whole:
        for client in (sending, never_whole):
            client.send(whole[:-1])
        await until(lambda: sum(one.busy or one._reader.in_part for one in router.app._clients.open) == 2)
        draining = asyncio.ensure_future(router.app.drain(PATIENCE))
        await asyncio.sleep(0)  # let it begin
        sending.send(whole[-1:])
        got = await sending.answer()
        assert (got.status, got.header(b"connection")) == (200, b"close")
        draining.cancel()
        await router.app.drain(0)
        refused = await never_whole.answer()
        assert (refused.status, refused.header(b"connection")) == (503, b"close")
        assert "--drain-timeout" in json.loads(refused.body)["error"]["message"]
        assert await never_whole.rest() == b""


async def test_what_outlasts_draining_is_told_so(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    a.then(in_two(HEAD + WHOLE, b"", Dialogue.drop), never)
    async with running(a) as router, router.client() as begun, router.client() as waiting:
        begun.send(post(body=BODY))
        await begun.head()
        await begun.chunk()
        waiting.send(post(body=BODY))
        await until(lambda: len(a.requests) == 2)
        await router.app.drain(0)
        last, answered = (await begun.chunk())[1], await waiting.answer()
        assert "--drain-timeout" in error_of(last)["message"]
        assert await begun.rest() == b"0\r\n\r\n"
        assert (answered.status, answered.header(b"connection")) == (503, b"close")
        assert router.total("router_requests_total", end="broken", status="503") == 1
    (told,) = (record for record in caplog.records if "outlast" in record.message)
    assert vars(told)["fields"] == {"cut_off": 2}


async def test_an_answer_that_begins_while_draining_says_that_it_is_the_last(a: ScriptedWorker) -> None:
    a.then(in_two(b"", HEAD + WHOLE + b"0\r\n\r\n", lambda _: None))
    async with running(a) as router, router.client() as client:
        client.send(post(body=BODY))
        await until(lambda: a.requests)
        draining = asyncio.ensure_future(router.app.drain(PATIENCE))
        await asyncio.sleep(0)  # let it begin
        a.go_on.set()
        assert (await client.answer()).header(b"connection") == b"close"
        await draining
