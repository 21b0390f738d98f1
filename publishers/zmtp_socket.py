"""A ZeroMQ socket on the event loop, with only what events and replays need: it connects and reconnects, or listens.

libzmq's own sockets read in a thread and wake the event loop for each message, which takes up to twice the CPU time
(docs/adr/0010-events-off-the-wire.md).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final, NamedTuple, cast

from publishers.zmtp import Kind, Peer, Violation

FIRST_DELAY, MOST_DELAY = 0.1, 1.0
"""Seconds before the first attempt to connect again, and the longest between two."""
CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt. A host that is gone does not answer, and its name may resolve to a new address next time."""
AFTER_VIOLATION = 5.0
"""Seconds before the next attempt where the other side, once connected, has violated the protocol: it may do so each
time."""
HANDSHAKE: Final = 30.0
"""Seconds within which the other side must complete the handshake, as in libzmq."""
TURN = 64
"""Messages delivered before other tasks on the event loop get a turn."""
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""TCP keep-alive (seconds, seconds, probes), where the system has the option: a host that vanished silently is noticed
after a minute."""
_TCP: Final = re.compile(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]/;]+)):(?P<port>\d{1,5}|\*)\Z")
_IPC: Final = re.compile(r"ipc://(?P<path>.+)\Z", re.DOTALL)


class Address(NamedTuple):
    """The address of a TCP port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""


class Heard(NamedTuple):
    """The callbacks of a socket, called in the order of what happens."""

    connected: Callable[[Connection], None]
    message: Callable[[list[bytes]], None]
    lost: Callable[[], None]
    """A connection that `connected` was called with is lost."""
    broken: Callable[[str], None]
    """The other side has violated the protocol; says how."""


class ZmtpSocket:
    """Connects or listens from its creation until `close`."""

    def __init__(self, kind: Kind, endpoint: str, heard: Heard, most_bytes: int, *, listen: bool = False) -> None:
        """Raises ValueError for an endpoint that is not an address, OSError for one that cannot be listened on."""
        self.connections: set[Connection] = set()
        self.heard: Heard | None = heard
        self.port = 0
        """The port listened on; 0 where it connects."""
        address = read_endpoint(endpoint, listen=listen)

        def make() -> Connection:
            return Connection(self, Peer(kind, most_bytes))

        work: Coroutine[None, None, None]
        if listen:
            bound = _bound(address, endpoint)
            self.port = bound.getsockname()[1]
            work = _listen(bound, make)
        else:
            work = _keep_connecting(address, make)
        self.task = asyncio.create_task(work, name=f"connection of {endpoint}")

    def close(self) -> None:
        """Closes all connections; no callback is called any more."""
        self.heard = None
        self.task.cancel()
        for connection in list(self.connections):
            connection.transport.abort()


class Connection(asyncio.Protocol):
    """A connection of the socket `owner`."""

    transport: asyncio.Transport

    def __init__(self, owner: ZmtpSocket, peer: Peer) -> None:
        self._owner = owner
        self._peer = peer
        self.agreed = self.broken = False
        self._waiting: deque[list[bytes]] = deque()
        """Messages not delivered yet. While there are any nothing more is read, and the other side has to buffer."""
        self._paused = False
        self._loop = asyncio.get_running_loop()
        self._patience: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._owner.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._patience = self._loop.call_later(HANDSHAKE, self.transport.abort)
        self._answer()

    def data_received(self, data: bytes) -> None:
        heard, peer = self._owner.heard, self._peer
        if heard is None or self.broken:
            return
        try:
            messages = peer.feed(data)
        except Violation as violation:
            self.broken = True
            self.transport.abort()
            heard.broken(str(violation))
            return
        if peer.answers:
            self._answer()
        if not self.agreed and peer.ready:
            self.agreed = True
            self._stop_waiting()
            heard.connected(self)
        self._waiting.extend(messages)
        self._tell(TURN)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's signature
        self._owner.connections.discard(self)
        self._stop_waiting()
        if not self.over.done():
            self.over.set_result(None)
        self._tell(len(self._waiting))
        if self.agreed and self._owner.heard:
            self._owner.heard.lost()

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def _tell(self, most: int) -> None:
        waiting, owner = self._waiting, self._owner
        while waiting and most and owner.heard:  # any callback may close the socket
            owner.heard.message(waiting.popleft())
            most -= 1
        if (waiting or self._paused) and owner.heard and not self.transport.is_closing():
            self._go_on(bool(waiting))

    def _go_on(self, waiting: bool) -> None:
        if waiting:
            self._loop.call_soon(self._tell, TURN)
        if waiting != self._paused:
            self._paused = waiting
            (self.transport.pause_reading if waiting else self.transport.resume_reading)()

    def _stop_waiting(self) -> None:
        if self._patience:
            self._patience.cancel()
            self._patience = None

    def _answer(self) -> None:
        answers, self._peer.answers = self._peer.answers, []
        self.transport.write(b"".join(answers))


async def _listen(bound: socket.socket, make: Callable[[], Connection]) -> None:
    async with await asyncio.get_running_loop().create_server(make, sock=bound) as server:
        await server.serve_forever()


async def _keep_connecting(address: Address, make: Callable[[], Connection]) -> None:
    delay = FIRST_DELAY
    while True:
        with suppress(OSError, ValueError):  # ValueError: an impossible host name or path
            async with asyncio.timeout(CONNECT_TIMEOUT):
                connection = await _connect(address, make)
            await connection.over
            if connection.agreed:
                delay = AFTER_VIOLATION if connection.broken else FIRST_DELAY
        await asyncio.sleep(delay)
        delay = min(2 * delay, MOST_DELAY)


async def _connect(address: Address, make: Callable[[], Connection]) -> Connection:
    loop = asyncio.get_running_loop()
    if address.path:
        return (await loop.create_unix_connection(make, address.path))[1]
    return (await loop.create_connection(make, address.host, address.port))[1]


def read_endpoint(endpoint: str, *, listen: bool) -> Address:
    """Parses `tcp://HOST:PORT` or `ipc://PATH`. A `*` is any host or port (to listen on). Raises ValueError."""
    ipc, tcp = _IPC.match(endpoint), _TCP.match(endpoint)
    if ipc and not listen:
        path = ipc["path"]
        return Address(path="\0" + path[1:] if path.startswith("@") else path)
    if not tcp:
        raise _unusable(endpoint, "it is neither tcp://HOST:PORT nor ipc://PATH")
    host, port = tcp["v6"] or tcp["host"], tcp["port"]
    if not listen and "*" in (host, port):
        raise _unusable(endpoint, "a * is nothing to connect to")
    if port != "*" and not 0 < int(port) < 1 << 16:
        raise _unusable(endpoint, "there is no such port")
    return Address("0.0.0.0" if host == "*" else host, 0 if port == "*" else int(port))  # noqa: S104 -- as it was stated


def _bound(address: Address, endpoint: str) -> socket.socket:
    try:
        return socket.create_server(
            (address.host, address.port), family=socket.AF_INET6 if ":" in address.host else socket.AF_INET
        )
    except UnicodeError as error:
        raise _unusable(endpoint, str(error)) from None
    except OSError as error:
        raise OSError(f"{endpoint!r} cannot be listened on: {error.strerror or error}") from None


def _unusable(endpoint: str, reason: str) -> ValueError:
    return ValueError(f"{endpoint!r} cannot be used for events: {reason}")
