"""The workers' side: connections to one worker, kept and reused, and what a worker's answer is made of.

A connection carries one request at a time. Its receiver gets the head, then the body's bytes exactly as they came,
framed but not decoded, and is told whether the body ended or broke.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from router.http.chunked import ChunkedBody, MalformedChunk
from router.http.messages import Headers

IDLE_LIFE = 4.0
"""Seconds that an idle connection is kept. Engines serve with uvicorn, which closes after 5 s (`timeout_keep_alive`); a
shorter life here means that a request is hardly ever sent into a connection that is just being closed."""
_MAX_HEAD = 64 * 1024


class Head(NamedTuple):
    """A worker's status and headers. `chunked` None: the body ends with the connection, else its transfer coding."""

    status: int
    headers: Headers
    chunked: ChunkedBody | None
    length: int | None
    """Of a body that is not chunked; None: it ends with the connection."""
    keep_alive: bool


class Receiver(Protocol):
    """Who gets the answer. After `on_end` or `on_broken` nothing more comes."""

    def on_head(self, head: Head) -> None: ...

    def on_body(self, data: bytes, boundary: int) -> None:
        """`boundary`: for a chunked body, the index behind the last chunk in `data` that ends a whole event."""

    def on_end(self) -> None: ...

    def on_broken(self, reason: str) -> None: ...


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    authority: bytes
    """For the Host header."""
    base: bytes
    """Path before every target, without the last slash."""


def parse_address(url: str) -> Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Address(
        parts.hostname or "",
        parts.port or (443 if tls else 80),
        tls,
        parts.netloc.rpartition("@")[2].encode(),
        parts.path.rstrip("/").encode(),
    )


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._receiver: Receiver | None = None
        self._head: Head | None = None
        self._buffer = b""
        self._left = 0
        self._head_only = False
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, receiver: Receiver, request: list[bytes], head_only: bool) -> None:
        """Begin a request (its head and body); `head_only`: it is HEAD, whose answer has no body."""
        self._receiver = receiver
        self._head = None
        self._buffer = b""
        self._head_only = head_only
        self.requests += 1
        self._transport.writelines(request)

    def abort(self) -> None:
        """Close at once: the worker sees the client gone and stops working for it."""
        self._receiver = None
        self._transport.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.discard(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._head and self._head.chunked is None and self._head.length is None and exc is None:
            receiver.on_end()
        else:
            receiver.on_broken("the connection was closed" if exc is None else str(exc))

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self._transport.abort()  # nothing was asked: the connection cannot be trusted any more
        elif self._head is None:
            self._take_head(self._buffer + data if self._buffer else data)
        else:
            self._take_body(self._receiver, self._head, data)

    def _take_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = data
            if len(data) > _MAX_HEAD:
                self._break("its answer's head is too long")
            return
        try:
            head = _parse_head(data[: end + 4], self._head_only)
        except httptools.HttpParserError:
            self._break("its answer is not valid HTTP")
            return
        rest = data[end + 4 :]
        if head.status < 200:  # 100 Continue, 103 Early Hints: the answer proper follows
            self._buffer = b""
            if rest:
                self._take_head(rest)
            return
        self._head = head
        self._left = head.length or 0
        receiver = self._receiver
        if receiver is None:
            return
        receiver.on_head(head)
        if head.length == 0:
            self._finish(b"")
        elif rest and self._receiver is receiver:
            self._take_body(receiver, head, rest)

    def _take_body(self, receiver: Receiver, head: Head, data: bytes) -> None:
        if head.chunked is not None:
            self._take_chunks(receiver, head.chunked, data)
        elif head.length is None:
            receiver.on_body(data, 0)
        else:
            excess = data[self._left :]
            self._left -= len(data) - len(excess)
            receiver.on_body(data[: len(data) - len(excess)] if excess else data, 0)
            if not self._left:
                self._finish(excess)

    def _take_chunks(self, receiver: Receiver, body: ChunkedBody, data: bytes) -> None:
        try:
            boundary = body.feed(data)
        except MalformedChunk as error:
            self._break(str(error))
            return
        receiver.on_body(data[:boundary] if body.excess else data, boundary)
        if body.done:
            self._finish(body.excess)

    def _finish(self, excess: bytes) -> None:
        receiver, self._receiver = self._receiver, None
        head = self._head
        if receiver is None or head is None:
            return  # the receiver aborted while it was given the last bytes
        if excess or not head.keep_alive:
            self._transport.abort()
        else:
            self.resume()  # the client may have paused it; the next request's answer is to be read
            self._pool.give_back(self)
        receiver.on_end()

    def _break(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._transport.abort()
        if receiver:
            receiver.on_broken(reason)


class _HeadParts:
    """What httptools calls while it parses a head."""

    def __init__(self) -> None:
        self.headers: Headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def _parse_head(data: bytes, head_only: bool) -> Head:
    parts = _HeadParts()
    parser = httptools.HttpResponseParser(parts)
    parser.feed_data(data)
    status = parser.get_status_code()
    length: int | None = None
    chunked: ChunkedBody | None = None
    for name, value in parts.headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and value.lower() == b"chunked":
            chunked = ChunkedBody()
    if head_only or status in {204, 304}:
        length, chunked = 0, None
    elif chunked:
        length = None
    keep_alive = parser.should_keep_alive() or (head_only and parser.get_http_version() == "1.1")
    return Head(status, parts.headers, chunked, length, keep_alive)


class Lease:
    """A promise of a connection, to be cancelled when it is not wanted any more."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task:
            self.task.cancel()


class Pool:
    """Connections to one worker; as many as there are requests at a time, idle ones kept for `IDLE_LIFE`."""

    def __init__(self, url: str, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self.address = parse_address(url)
        self._tls = (tls or ssl.create_default_context()) if self.address.tls else None
        self._connect_timeout = connect_timeout
        self._idle: list[tuple[WorkerConnection, float]] = []
        self._open: set[WorkerConnection] = set()

    def __repr__(self) -> str:
        return f"<Pool {self.address.authority.decode()}: {len(self._open)} open, {len(self._idle)} idle>"

    def take(
        self, ready: Callable[[WorkerConnection], None], failed: Callable[[str], None], fresh: bool = False
    ) -> Lease:
        """Call `ready` with a connection, at once if one is idle (and `fresh` is not asked for), or `failed`."""
        lease = Lease()
        now = asyncio.get_running_loop().time()
        while self._idle and not fresh:
            connection, since = self._idle.pop()
            if now - since < IDLE_LIFE:
                ready(connection)
                return lease
            connection.abort()
        lease.task = asyncio.get_running_loop().create_task(self._connect(ready, failed))
        return lease

    async def _connect(self, ready: Callable[[WorkerConnection], None], failed: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: WorkerConnection(self), self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError:
            failed(f"no connection within {self._connect_timeout:g} s")
        except OSError as error:
            failed(error.strerror or str(error))
        else:
            self._open.add(connection)
            ready(connection)

    def give_back(self, connection: WorkerConnection) -> None:
        self._idle.append((connection, asyncio.get_running_loop().time()))

    def discard(self, connection: WorkerConnection) -> None:
        self._open.discard(connection)
        self._idle = [kept for kept in self._idle if kept[0] is not connection]

    def close(self) -> None:
        """Abort every connection, busy ones too."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
