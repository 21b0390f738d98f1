"""Endpoints, and who does not behave; the rest of sockets' ways is tested with `zmq_source`, before libzmq."""

from __future__ import annotations

import asyncio

import pytest

import publishers.zmtp_socket
from publishers.zmtp_socket import Address, Heard, ZmtpSocket, read_endpoint
from tests.fakes.waiting import until

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
