"""Endpoints, and who does not behave; the rest of sockets' ways is tested with `zmq_source`, before libzmq."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import publishers.zmtp_socket
from publishers.zmtp import message
from publishers.zmtp_socket import TURN, Address, Heard, ZmtpSocket, read_endpoint
from tests.fakes.waiting import until
from tests.publishers.test_zmtp import HELLO

LIMIT = 1000


@pytest.mark.parametrize(
    ("endpoint", "listen", "address"),
    [
        ("tcp://engine-1:5557", False, Address("engine-1", 5557)),
        ("tcp://[::1]:5557", False, Address("::1", 5557)),
        ("tcp://*:5557", True, Address("0.0.0.0", 5557)),
        ("tcp://127.0.0.1:*", True, Address("127.0.0.1", 0)),
        ("ipc:///tmp/events", False, Address(path="/tmp/events")),
        ("ipc://@events", False, Address(path="\0events")),
    ],
)
def test_where_an_endpoint_is(endpoint: str, listen: bool, address: Address) -> None:
    assert read_endpoint(endpoint, listen=listen) == address


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://h:*", "tcp://h:0", "tcp://h:65536", "inproc://x", "ipc://"]
)
def test_what_cannot_be_connected_to(endpoint: str) -> None:
    with pytest.raises(ValueError, match="cannot be used for events"):
        read_endpoint(endpoint, listen=False)


async def test_a_port_that_is_taken_cannot_be_listened_on() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(OSError, match="in use"):
            ZmtpSocket("SUB", f"tcp://127.0.0.1:{port}", nothing(), LIMIT, listen=True)


def nothing() -> Heard:
    return Heard(lambda _: None, lambda _: None, lambda: None, lambda _: None)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\n\r\n" * 4])
async def test_whoever_does_not_greet_is_left_and_tried_again(monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    monkeypatch.setattr(publishers.zmtp_socket, "HANDSHAKE", 0.01)
    monkeypatch.setattr(publishers.zmtp_socket, "FIRST_DELAY", 0.0)
    tried: list[asyncio.BaseTransport] = []

    class Other(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            tried.append(transport)
            assert isinstance(transport, asyncio.Transport)
            transport.write(says)

    server = await asyncio.get_running_loop().create_server(Other, "127.0.0.1", 0)
    async with server:
        connects = ZmtpSocket("SUB", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", nothing(), LIMIT)
        await until(lambda: len(tried) > 2)
        connects.close()
        await asyncio.gather(connects.task, return_exceptions=True)
        await until(lambda: all(transport.is_closing() for transport in tried))


@asynccontextmanager
async def speaking(said: bytes) -> AsyncIterator[tuple[str, list[asyncio.Transport]]]:
    """Says it to whoever connects: where, and to whom."""
    speaks: list[asyncio.Transport] = []

    class Publisher(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            speaks.append(transport)
            transport.write(said)

    server = await asyncio.get_running_loop().create_server(Publisher, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", speaks
        for transport in speaks:
            transport.close()


async def test_whoever_breaks_the_protocol_is_tried_again_after_another_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one: it is likely to do so again, and each time what it holds would be asked for."""
    monkeypatch.setattr(publishers.zmtp_socket, "FIRST_DELAY", 1000.0)
    monkeypatch.setattr(publishers.zmtp_socket, "AFTER_VIOLATION", 0.0)
    async with speaking(HELLO) as (endpoint, speaks):
        heard = Heard(lambda _: speaks[-1].write(b"\xff" * 100), lambda _: None, lambda: None, lambda _: None)
        follows = ZmtpSocket("SUB", endpoint, heard, LIMIT)
        await until(lambda: len(speaks) > 1)
        follows.close()
        await asyncio.gather(follows.task, return_exceptions=True)


COUNT = 3 * TURN + 1
NUMBERS = [b"%d" % number for number in range(COUNT)]
MESSAGES = b"".join(message([number]) for number in NUMBERS)


async def test_an_address_where_nobody_answers_is_left_and_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a container that was moved: else it takes two minutes until its name is asked for again."""
    monkeypatch.setattr(publishers.zmtp_socket, "CONNECT_TIMEOUT", 0.01, raising=False)
    monkeypatch.setattr(publishers.zmtp_socket, "FIRST_DELAY", 0.0)
    tried = 0

    async def never(*_: object) -> None:
        nonlocal tried
        tried += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    socket = ZmtpSocket("SUB", "tcp://engine-1:5557", nothing(), LIMIT)
    await until(lambda: tried > 2)
    socket.close()
    await asyncio.gather(socket.task, return_exceptions=True)


async def test_many_messages_at_once_leave_others_their_turn_and_are_all_told_of_before_the_end() -> None:
    told: list[bytes] = []
    lost = asyncio.Event()
    heard = Heard(lambda _: None, told.extend, lost.set, lambda _: None)
    async with speaking(HELLO + MESSAGES) as (endpoint, speaks):
        follows = ZmtpSocket("SUB", endpoint, heard, LIMIT)
        seen: list[tuple[int, bool]] = []
        while len(told) < COUNT:
            await asyncio.sleep(0)
            seen += [(len(told), each.transport.is_reading()) for each in follows.connections]
        assert {(TURN, False), (2 * TURN, False), (3 * TURN, False), (COUNT, True)} <= set(seen)
        speaks[0].write(MESSAGES)
        speaks[0].close()
        await lost.wait()
        follows.close()
        await asyncio.gather(follows.task, return_exceptions=True)
    assert told == NUMBERS * 2


async def test_what_waits_when_a_connection_breaks_is_told_of_before_that() -> None:
    told: list[bytes | str] = []

    def break_at_the_first(frames: list[bytes]) -> None:
        told.extend(frames)
        if len(told) == 1:
            (connection,) = follows.connections
            connection.transport.abort()

    async with speaking(HELLO + MESSAGES) as (endpoint, _):
        follows = ZmtpSocket(
            "SUB",
            endpoint,
            Heard(lambda _: None, break_at_the_first, lambda: told.append("lost"), lambda _: None),
            LIMIT,
        )
        await until(lambda: "lost" in told)
        follows.close()
        await asyncio.gather(follows.task, return_exceptions=True)
    assert told == [*NUMBERS, "lost"]
