"""Endpoints, and who does not behave; the rest of sockets' ways is tested with `zmq_source`, before libzmq."""

from __future__ import annotations

import asyncio

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
        with pytest.raises(ValueError, match="in use"):
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


async def test_many_messages_at_once_leave_others_their_turn_and_are_all_told_of_before_the_end() -> None:
    count = 3 * TURN + 1
    told: list[bytes] = []
    lost = asyncio.Event()
    heard = Heard(lambda _: None, told.extend, lost.set, lambda _: None)
    said = HELLO + b"".join(message([b"%d" % number]) for number in range(count))
    speaks: list[asyncio.Transport] = []

    class Publisher(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            speaks.append(transport)
            transport.write(said)

    server = await asyncio.get_running_loop().create_server(Publisher, "127.0.0.1", 0)
    async with server:
        follows = ZmtpSocket("SUB", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard, LIMIT)
        seen: list[tuple[int, bool]] = []
        while len(told) < count:
            await asyncio.sleep(0)
            seen += [(len(told), each.transport.is_reading()) for each in follows.connections]
        assert {(TURN, False), (2 * TURN, False), (3 * TURN, False), (count, True)} <= set(seen)
        speaks[0].write(said[len(HELLO) :])
        speaks[0].close()
        await lost.wait()
        follows.close()
        await asyncio.gather(follows.task, return_exceptions=True)
    assert told == [b"%d" % number for number in range(count)] * 2
