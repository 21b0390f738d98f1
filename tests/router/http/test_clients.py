"""Clients that are slow, many or heavy: what each may take of the router's time and memory."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.clients import _PIECE, LARGE, READ_AHEAD, SPARE, Clients, Limits
from router.http.front import MAX_PIPELINED, Connection
from router.http.messages import Response, write_response
from tests.router.http.test_chunked import chunk
from tests.router.http.test_front import CHUNKED, GET, POST, Site

LIMITS = Limits(10 * LARGE, max_buffered=4 * LARGE, max_connections=3, client_timeout=10.0, keep_alive_timeout=30.0)


def site(*, slow: bool = False, clients: Clients[Connection] | None = None) -> Site:
    return Site(slow, clients=clients or Clients(LIMITS))


def post(size: int, chunked: bool = False) -> bytes:
    if chunked:
        framing, body = b"transfer-encoding: chunked", chunk(b"x" * size) + b"0\r\n\r\n"
    else:
        framing, body = b"content-length: %d" % size, b"x" * size
    return b"POST /p HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n%s" % (framing, body)


# -- time


@pytest.mark.parametrize("begun", [GET[:5], GET[:-2], POST[:-2], CHUNKED[:-2], POST + POST[:10], POST + POST[:-2]])
def test_a_request_that_does_not_come_whole_is_given_up(begun: bytes) -> None:
    one = site()
    one.feed(begun)
    for now in (100.0, 105.0, 109.9):
        one.connection.tick(now)
        assert b" 408 " not in one.transport.written
    one.connection.tick(110.0)
    assert b"HTTP/1.1 408 Request Timeout\r\n" in one.transport.written
    assert one.transport.eof
    one.later[-1]()
    assert one.transport.closed
    assert one.clients.refused == {"slow_request": 1}


def test_a_byte_now_and_then_gains_no_time() -> None:
    one = site()
    for second in range(11):
        one.feed(POST[second : second + 1])
        one.connection.tick(100.0 + second)
    assert one.transport.status == 408


def test_each_request_has_its_own_time() -> None:
    one = site()
    for second in range(0, 100, 5):
        one.feed(POST[:20] if second % 10 == 0 else POST[20:])
        one.connection.tick(100.0 + second)
    assert b" 408 " not in one.transport.written
    assert len(one.requests) == 10


def test_whom_the_router_does_not_read_from_is_not_slow() -> None:
    one = site(slow=True)
    one.feed(GET * (MAX_PIPELINED + 1) + GET[:5])
    assert not one.transport.reading
    for now in (100.0, 200.0):
        one.connection.tick(now)
    assert not one.clients.refused


def test_one_that_waits_for_its_refusal_is_not_slow() -> None:
    """What it sent behind that is not read."""
    one = site()
    one.feed(GET)
    one.connection.pause_writing()
    one.feed(GET * 2 + b"nonsense\r\n\r\n")
    one.slow = True
    one.connection.resume_writing()
    for now in (100.0, 110.0):
        one.connection.tick(now)
    assert not one.clients.refused


def test_one_whose_next_request_is_slow_still_gets_its_answer() -> None:
    one = site(slow=True)
    one.feed(POST + POST[:-1])
    for now in (100.0, 110.0):
        one.connection.tick(now)
    assert one.transport.written == b""
    one.connection.respond(Response(200, b"whole"))
    assert one.transport.written.endswith(b"whole")
    assert one.transport.closed


def test_an_answer_that_is_not_taken_is_cut_and_its_request_cancelled() -> None:
    one = site(slow=True)
    one.feed(GET)
    one.connection.pause_writing()
    one.transport.unsent = 100_000
    for now in (100.0, 109.0):
        one.connection.tick(now)
        assert not one.transport.aborted
    one.connection.tick(110.0)
    assert one.transport.aborted
    assert one.exchange.calls == ["pause", "cancel"]
    assert one.clients.refused == {"slow_answer": 1}


def test_one_that_takes_a_little_is_left_alone() -> None:
    one = site(slow=True)
    one.feed(GET)
    one.connection.pause_writing()
    for second in range(50):
        one.transport.unsent = 100_000 - second // 9
        one.connection.tick(100.0 + second)
    assert not one.transport.aborted


def test_nor_is_one_cut_off_for_taking_what_has_come_meanwhile() -> None:
    """When little is left, as much again is read from the worker, and that too is taken bit by bit."""
    one = site(slow=True)
    one.feed(GET)
    one.connection.pause_writing()
    for second in range(50):
        one.transport.unsent = 16_000 if not second else 300_000 - second
        one.connection.tick(100.0 + second)
    assert not one.transport.aborted


def test_the_rest_of_an_answer_has_its_time_too_and_more_of_it_gains_none() -> None:
    one = site()
    one.feed(GET)
    for second in range(11):
        one.transport.unsent = 100 + second
        assert not one.transport.aborted
        one.connection.tick(100.0 + second)
    assert one.transport.aborted


def test_an_answer_may_take_as_long_as_its_worker_does() -> None:
    one = site(slow=True)
    one.feed(GET)
    for now in (100.0, 1000.0):
        one.connection.tick(now)
    assert not one.transport.closed


@pytest.mark.parametrize("before", [b"", GET, POST * 3])
def test_a_connection_without_a_request_is_closed_in_silence(before: bytes) -> None:
    one = site()
    one.feed(before)
    written = one.transport.written
    for now in (100.0, 129.9):
        one.connection.tick(now)
        assert not one.transport.closed
    one.connection.tick(130.0)
    assert one.transport.closed
    assert one.transport.written == written
    assert not one.clients.refused


def test_a_request_between_two_looks_makes_it_another_rest() -> None:
    one = site()
    for second in range(0, 200, 20):
        one.connection.tick(100.0 + second)
        one.feed(POST)
    assert not one.transport.closed


def test_what_is_idle_and_then_begins_has_all_its_time() -> None:
    one = site()
    for now in (100.0, 129.0):
        one.connection.tick(now)
    one.feed(POST[:5])
    for now in (130.0, 139.0):
        one.connection.tick(now)
    one.feed(POST[5:])
    assert one.transport.status == 200


async def test_all_are_looked_at_however_many_and_whoever_leaves_meanwhile() -> None:
    clients: Clients[Connection] = Clients(LIMITS._replace(max_connections=10_000))
    sites = [site(clients=clients) for _ in range(2 * _PIECE + 1)]
    await clients.tick(100.0)
    looking = asyncio.create_task(clients.tick(130.0))
    await asyncio.sleep(0)  # others have their turn
    gone = next(one for one in sites if not one.transport.closed)
    gone.connection.connection_lost(None)
    await looking
    assert all(one.transport.closed is not (one is gone) for one in sites)


# -- how many


def test_a_connection_beyond_the_limit_is_told_so_and_those_far_beyond_are_closed() -> None:
    clients: Clients[Connection] = Clients(LIMITS)
    sites = [site(clients=clients) for _ in range(3 + SPARE + 1)]
    assert [one.transport.status for one in sites] == [0] * 3 + [503] * SPARE + [0]
    assert [one.transport.aborted for one in sites] == [False] * (3 + SPARE) + [True]
    sites[3].feed(GET)
    assert sites[3].requests == []
    sites[3].later[0]()
    assert sites[3].transport.closed
    assert clients.refused == {"max_connections": SPARE + 1}
    for one in sites[1:]:
        one.connection.connection_lost(None)
    sites[0].feed(GET)
    assert sites[0].transport.status == 200
    again = site(clients=clients)
    again.feed(GET)
    assert again.transport.status == 200


# -- how much


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [LARGE, LARGE + 1, 3 * LARGE])
@pytest.mark.parametrize("cut", [50, 200, LARGE + 60, 10**9])
def test_a_large_body_is_counted_until_its_answers_end(chunked: bool, size: int, cut: int) -> None:
    one = site(slow=True)
    counts = size if size > LARGE else 0
    for _ in range(3):  # the second time its head is known
        message = post(size, chunked)
        one.feed(message[:cut])
        assert one.clients.buffered <= counts
        one.feed(message[cut:])
        assert one.clients.buffered == counts
        one.connection.respond(Response(200))
        assert one.clients.buffered == 0


@pytest.mark.parametrize("reads", [[post(3 * LARGE) * 2], [post(3 * LARGE)] * 2])
def test_bodies_that_come_in_one_piece_count_together(reads: list[bytes]) -> None:
    one = site(slow=True)
    for read in reads:
        one.feed(read)
    assert (len(one.requests), one.clients.buffered, one.clients.refused) == (1, 3 * LARGE, {"max_buffered": 1})


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("end", [-1, None], ids=["in part", "whole"])
def test_what_comes_behind_the_last_request_is_not_kept(end: int | None, slow: bool) -> None:
    """Its connection may stay open for long, until the client has taken the answer."""
    one = site(slow=slow)
    one.feed(POST[:10])
    one.connection.drain()
    one.feed(POST[10:] + post(3 * LARGE)[:end])
    assert (one.transport.closed, one.clients.buffered, one.connection._reader._body) == (not slow, 0, [])


def test_what_waits_behind_the_last_answer_is_not_kept() -> None:
    """What cannot be read behind it has made that answer the last."""
    one = site(slow=True)
    one.feed(POST + post(2 * LARGE) + b"nonsense\r\n\r\n")
    assert (one.connection.closing, one.clients.buffered) == (True, 0)


def test_what_is_read_of_large_bodies_ends_at_the_limit() -> None:
    clients: Clients[Connection] = Clients(LIMITS)
    sites = [site(clients=clients) for _ in range(3)]
    for one in sites:
        one.feed(post(4 * LARGE)[: LARGE + 5000])
    for _ in range(18):
        for one in sites:
            one.feed(b"x" * 10_000)
            assert clients.buffered <= LIMITS.max_buffered
    refused = [one for one in sites if one.transport.status]
    assert refused
    assert {one.transport.status for one in refused} == {429}
    assert all(b"retry-after: 1\r\n" in one.transport.written for one in refused)
    assert clients.refused == {"max_buffered": len(refused)}
    for one in sites:
        one.connection.connection_lost(None)
    assert clients.buffered == 0
    again = site(clients=clients)
    again.feed(post(3 * LARGE))
    assert again.transport.status == 200, "it has cleared by itself"


@pytest.mark.parametrize("size", [1, 1000, LARGE])
def test_reading_pauses_when_enough_waits_for_the_one_before(size: int) -> None:
    """What is held of a connection: small bodies ahead, and what was read in one go."""
    one, piece = site(slow=True), 10_000
    stream = post(size) * 200
    fed = 0
    while one.transport.reading:
        one.feed(stream[fed : fed + piece])
        fed += piece
    assert fed <= READ_AHEAD + 2 * (size + 100) + piece
    assert len(one.connection._waiting) <= MAX_PIPELINED + piece // size
    served = 0
    while served < 50:
        one.connection.respond(Response(200))
        served += 1
        while one.transport.reading and fed < len(stream):
            one.feed(stream[fed : fed + piece])
            fed += piece
    assert len(one.requests) >= served


@pytest.mark.parametrize("place", [b"/a?b", b"Host: x"], ids=["target", "headers"])
def test_reading_pauses_when_long_heads_wait(place: bytes) -> None:
    one = site(slow=True)
    message = GET.replace(place, place + b"x" * (READ_AHEAD // 2))
    one.feed(message * 2)
    assert one.transport.reading
    one.feed(message)
    assert not one.transport.reading


@pytest.mark.parametrize(("size", "number", "most"), [(5, 100, MAX_PIPELINED + 100), (READ_AHEAD, 2, 2)])
def test_reading_goes_on_only_when_little_waits(size: int, number: int, most: int) -> None:
    one = site(slow=True)
    for _ in range(20):
        while one.transport.reading:
            one.feed(post(size) * number)
        assert len(one.connection._waiting) <= most
        one.connection.respond(Response(200))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["small", "large", "chunked", "rest", "answer", "lose", "drain", "408"])
        ),
        max_size=40,
    )
)
def test_what_is_counted_is_what_is_held(steps: list[tuple[int, str]]) -> None:
    clients: Clients[Connection] = Clients(LIMITS._replace(max_connections=1000, max_buffered=10**9))
    sites = [site(slow=True, clients=clients) for _ in range(3)]
    rests = [b""] * 3
    for number, step in steps:
        one = sites[number]
        message = post({"small": 100}.get(step, 2 * LARGE), step == "chunked")
        if step in {"small", "large", "chunked"} and not one.connection.closing:
            one.feed(rests[number] + message[: LARGE + 1000])
            rests[number] = message[LARGE + 1000 :]
        elif step == "rest" and not one.connection.closing:
            one.feed(rests[number])
            rests[number] = b""
        elif step == "answer":
            one.connection.respond(Response(200))
        elif step == "408":
            for now in (0.0, 10.0):
                one.connection.tick(now)
        elif step == "drain":
            one.connection.drain()
        if step == "lose" or one.transport.closed:
            one.connection.connection_lost(None)
            sites[number], rests[number] = site(slow=True, clients=clients), b""
        assert clients.buffered == sum(_held(each.connection) for each in sites)
    for one in sites:
        one.connection.connection_lost(None)
    assert (clients.buffered, clients.open) == (0, set())


def _held(connection: Connection) -> int:
    requests = [*connection._waiting, *([connection._current] if connection._current else [])]
    reading = sum(map(len, connection._reader._body))
    return sum(size for size in (reading, *(len(each.body) for each in requests)) if size > LARGE)


async def test_answers_made_here_have_the_date_of_the_last_look() -> None:
    clock = iter((0.0, 86_400.0))
    clients: Clients[Connection] = Clients(Limits(1000), wall_clock=lambda: next(clock))
    one = site(clients=clients)
    one.feed(GET)
    await clients.tick(1.0)
    one.feed(GET)
    one.feed(b"nonsense\r\n\r\n")
    dates = [line for line in one.transport.written.split(b"\r\n") if line.startswith(b"date: ")]
    assert dates == [b"date: Thu, 01 Jan 1970 00:00:00 GMT", *([b"date: Fri, 02 Jan 1970 00:00:00 GMT"] * 2)]


def test_a_workers_answer_keeps_its_own_date() -> None:
    theirs = Response(400, b"no", headers=((b"date", b"theirs"),))
    assert write_response(theirs, b"", date=b"date: ours\r\n").count(b"date: ") == 1
