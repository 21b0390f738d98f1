"""Who is told of a connection that does not come about."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from router.http.pool import IDLE_LIFE, Address, NoConnection, Pool, parse_address
from router.http.upstream import Head, KnownHeads, WorkerConnection
from tests.router.http.test_front import FakeTransport


class Nobody:
    """Who gets an answer, and does nothing with it."""

    def on_head(self, head: Head, length: int | None) -> None: ...

    def on_body(self, data: bytes, boundary: int) -> None: ...

    def on_chunks(self, chunks: int) -> None: ...

    def on_end(self) -> None: ...

    def on_broken(self, reason: str) -> None: ...


@pytest.mark.parametrize("head", [b"content-length: 2\r\n", b"content-length: 2\r\nconnection: close\r\n", b""])
def test_each_whole_answer_is_a_sign_of_life(head: bytes) -> None:
    """Whatever becomes of its connection."""
    pool = Pool("http://127.0.0.1:9", 60.0)
    connection = WorkerConnection(KnownHeads(), pool._give_back, pool._discard)
    connection.connection_made(FakeTransport())
    connection.send(Nobody(), b"GET / HTTP/1.1\r\n\r\n", b"", False)
    connection.data_received(b"HTTP/1.1 200 OK\r\n%b\r\nok" % head)
    if head != b"content-length: 2\r\n":
        connection.connection_lost(None)
    assert pool.ended == 1
    assert (pool.take_idle() is connection) == (head == b"content-length: 2\r\n")


def answer_over(connection: WorkerConnection) -> None:
    connection.send(Nobody(), b"GET / HTTP/1.1\r\n\r\n", b"", False)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def test_what_is_not_taken_again_after_a_rush_is_closed() -> None:
    """Proxies in front of engines keep connections open for hours."""
    times = iter((0.0, 0.0, 0.0, *(now for later in (-1.0, 0.0, 1.0) for now in (IDLE_LIFE + later,) * 2)))
    pool = Pool("http://127.0.0.1:9", 60.0, clock=times.__next__)
    transports = [FakeTransport() for _ in range(3)]
    for transport in transports:
        connection = WorkerConnection(KnownHeads(), pool._give_back, pool._discard)
        connection.connection_made(transport)
        answer_over(connection)
    for _ in range(3):
        latest = pool.take_idle()
        assert latest
        answer_over(latest)
    assert [transport.aborted for transport in transports] == [True, True, False]


def test_what_is_idle_for_too_long_is_closed_though_no_request_comes() -> None:
    now = 0.0
    pool = Pool("http://127.0.0.1:9", 60.0, clock=lambda: now)
    transports = [FakeTransport() for _ in range(3)]
    for number, transport in enumerate(transports):
        now = float(number)
        connection = WorkerConnection(KnownHeads(), pool._give_back, pool._discard)
        connection.connection_made(transport)
        answer_over(connection)
    now = IDLE_LIFE + 1.0
    pool.close_expired()
    assert [transport.aborted for transport in transports] == [True, True, False]
    assert pool.take_idle() is connection


def test_a_request_does_not_get_a_connection_that_was_idle_for_too_long_which_is_closed() -> None:
    now = 0.0
    pool, transport = Pool("http://127.0.0.1:9", 60.0, clock=lambda: now), FakeTransport()
    connection = WorkerConnection(KnownHeads(), pool._give_back, pool._discard)
    connection.connection_made(transport)
    answer_over(connection)
    now = IDLE_LIFE
    assert pool.take_idle() is None
    assert transport.aborted


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu-1", Address("gpu-1", 80, False, b"gpu-1", b"")),
        ("https://gpu-1/", Address("gpu-1", 443, True, b"gpu-1", b"")),
        ("https://me:word@gpu-1:8443/llm/", Address("gpu-1", 8443, True, b"gpu-1:8443", b"/llm")),
        ("http://[::1]:8000", Address("::1", 8000, False, b"[::1]:8000", b"")),
    ],
)
def test_where_a_url_leads(url: str, address: Address) -> None:
    assert parse_address(url) == address


def test_without_certificates_of_ones_own_https_is_checked_as_the_system_does() -> None:
    secure = Pool("https://gpu-1", 60.0)._tls
    assert secure
    assert (secure.verify_mode, secure.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert Pool("http://gpu-1", 60.0, ssl.create_default_context())._tls is None


class Wanting:
    def __init__(self, pool: Pool) -> None:
        self.told: list[WorkerConnection | NoConnection] = []
        self.task = pool.connect(self.told.append, self.told.append)


async def test_a_connection_that_fails_in_an_unusual_way_is_told_too() -> None:
    """Else the request would wait for its time limits."""
    waits = Wanting(Pool(f"http://{'a' * 64}.example:9", 60.0))
    await asyncio.gather(waits.task, return_exceptions=True)
    (told,) = waits.told
    assert isinstance(told, NoConnection)
    assert "label" in told.reason


async def test_whoever_waits_for_a_connection_when_its_worker_is_cut_off_is_told_once() -> None:
    pool = Pool("http://127.0.0.1:9", 60.0)
    waits, has_left = Wanting(pool), Wanting(pool)
    has_left.task.cancel()
    pool.cut("it was removed")
    await asyncio.gather(waits.task, has_left.task, return_exceptions=True)
    assert waits.told == [NoConnection("it was removed")]
    assert has_left.told == []
