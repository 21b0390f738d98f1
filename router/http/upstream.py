"""One connection to a worker, and the parts of a worker's answer.

A connection carries one request at a time. Its receiver gets the head, then the body's bytes exactly as they came
(framed, not decoded), and is told whether the body ended or broke off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, Protocol, cast

import httptools

from router.http import protocol
from router.http.chunked import EVENT_ENDS, SIZE_LINES, USUAL, ChunkedBody, MalformedChunk
from router.http.keep_alive import keep_alive
from router.http.messages import (
    RESPONSE_HEADERS,
    UNBUFFERED,
    Headers,
    first,
    header_lines,
    may_pass,
    status_line,
)
from router.http.repeated import without_length

_MAX_HEAD = 1024 * 1024
"""vLLM puts a line for each embedding into the head, as many as a client asks for; what is longer counts as a failure
of the worker."""
_MOST_HEADS, _LONGEST_KNOWN = 32, 4096
"""How many heads are remembered, and how many bytes one of them has at most."""
_LAST_CHUNK = len(b"0\r\n\r\n")
_NO_ANSWER = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""The second stands for status 101, though no other protocol was asked for."""
BOOKED = 16
"""The receiver is told of chunks (about as many tokens) by so many: engines allocate memory by blocks of that size."""
_JOINED = 16 * 1024
"""Bodies below this many bytes are copied behind the head; larger ones are written separately."""

Framing = Literal["empty", "sized", "chunked", "close"]
"""Where a body ends: it has none; after the stated length; with the last chunk; with the connection."""


class Head(NamedTuple):
    """A worker's status line and headers, without the Content-Length."""

    status: int
    framing: Framing
    events: bool
    """Whether the body is a stream of server-sent events that is not compressed."""
    keep_alive: bool
    passed_on: bytes
    """The status line, the header lines that pass to the client, as they came, and what is added to them."""

    @property
    def is_error(self) -> bool:
        return self.status >= 400


class Receiver(Protocol):
    """Gets the answer. Nothing is called after `on_end` or `on_broken`."""

    def on_head(self, head: Head, length: int | None) -> None:
        """`length`: the Content-Length if there is one (an answer to HEAD may have one, without a body)."""

    def on_body(self, data: bytes, boundary: int) -> None:
        """`boundary`: the index behind the last chunk in `data` that ends a whole event; 0 for other bodies."""

    def on_chunks(self, chunks: int) -> None:
        """So many chunks have come so far. Called every `BOOKED` chunks, and before the end."""

    def on_end(self) -> None: ...

    def on_broken(self, reason: str) -> None: ...


class KnownHeads:
    """Parsed heads of a worker's answers, which repeat at least until the Date header changes."""

    def __init__(self, passing: Collection[bytes] = RESPONSE_HEADERS) -> None:
        """`passing`: names of the headers that pass to clients."""
        self._passing = passing
        self._heads: dict[bytes, tuple[Head, int | None]] = {}

    def read(self, raw: bytes, head_only: bool) -> tuple[Head, int | None]:
        """The head and its Content-Length. Raises httptools.HttpParserError or HttpParserUpgrade."""
        if head_only or len(raw) > _LONGEST_KNOWN:
            return parse_head(raw, head_only, self._passing)
        key, length = without_length(raw)
        known = self._heads.get(key)
        if known is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            known = self._heads[key] = parse_head(raw, False, self._passing)
        return known if length is None or known[1] is None else (known[0], length)


class _Parts:
    """The callbacks of httptools for a head."""

    def __init__(self) -> None:
        self.headers: Headers = []
        self.parser = httptools.HttpResponseParser(self)
        self.keep_alive = False

    def on_headers_complete(self) -> None:
        """Asked here, since the parser forgets it behind an empty body."""
        self.keep_alive = self.parser.should_keep_alive()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))  # the parser leaves what is behind a value


def parse_head(
    raw: bytes, head_only: bool = False, passing: Collection[bytes] = RESPONSE_HEADERS
) -> tuple[Head, int | None]:
    """`head_only`: the answer is to HEAD. `passing`: as in KnownHeads. Raises httptools.HttpParserError or
    HttpParserUpgrade."""
    parts = _Parts()
    parser = parts.parser
    parser.feed_data(raw)
    headers, status = parts.headers, parser.get_status_code()
    framing = "empty" if head_only or status in {204, 304} else _framing(headers)
    stays = head_only and parser.get_http_version() == "1.1" and not _closes(headers)  # the parser awaits a body
    keep_alive = parts.keep_alive or stays
    streamed = (first(headers, b"content-type") or b"").startswith(b"text/event-stream")
    passed_on = status_line(status) + header_lines(_for_client(headers, passing, streamed))
    stated = first(headers, b"content-length")
    # RFC 9110 section 8.6 forbids one where there is never a body; beside a transfer coding the parser refuses it.
    length = None if stated is None or status == 204 else int(stated)
    return Head(status, framing, streamed and not _encoded(headers), keep_alive, passed_on), length


def _for_client(headers: Headers, passing: Collection[bytes], streamed: bool) -> Headers:
    passed = may_pass(headers, passing)
    return [*passed, UNBUFFERED] if streamed and first(passed, UNBUFFERED[0]) is None else passed


def _encoded(headers: Headers) -> bool:
    return (first(headers, b"content-encoding") or b"identity") != b"identity"


def _closes(headers: Headers) -> bool:
    return any(name == b"connection" and b"close" in value.lower() for name, value in headers)


def _framing(headers: Headers) -> Framing:
    if (first(headers, b"transfer-encoding") or b"").lower() == b"chunked":
        return "chunked"
    return "close" if first(headers, b"content-length") is None else "sized"


class WorkerConnection(protocol.Protocol):
    __slots__ = (
        "_buffer",
        "_chunked",
        "_discard",
        "_ended",
        "_events_to",
        "_head",
        "_head_only",
        "_heads",
        "_interim",
        "_left",
        "_paused",
        "_receiver",
        "_transport",
        "heard",
        "latest",
        "recent",
        "requests",
    )

    def __init__(
        self,
        heads: KnownHeads,
        ended: Callable[[WorkerConnection, bool], None],
        discard: Callable[[WorkerConnection], None],
    ) -> None:
        """`ended(connection, usable)` is called when an answer is complete; `discard` when the connection is gone."""
        self._heads = heads
        self._ended = ended
        self._discard = discard
        self._transport: asyncio.Transport
        self._receiver: Receiver | None = None
        self._head: Head | None = None
        self._chunked: ChunkedBody | None = None
        self._buffer = b""
        self._interim = 0  # bytes of heads before the answer's own
        self._left = 0
        self._head_only = False
        self._paused = False
        self._events_to: Callable[[bytes], None] | None = None
        self.recent = self.latest = b""
        """The last two pieces of the body, the older first."""
        self.heard = False
        """Whether anything of the answer has come."""
        self.requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock:
            keep_alive(sock)

    def send(self, receiver: Receiver, head: bytes, body: bytes, head_only: bool) -> None:
        """Begin a request. `head_only`: it is HEAD, whose answer has no body."""
        self._receiver = receiver
        self._head = None
        self._interim = 0
        self._head_only = head_only
        self._events_to = None
        self.recent = self.latest = b""
        self.heard = False
        self.requests += 1
        if len(body) < _JOINED:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def abort(self) -> None:
        """Close at once. The worker sees that and stops working on the request."""
        self._receiver = self._events_to = None
        self._transport.abort()

    def pass_events(self, write: Callable[[bytes], None] | None) -> None:
        """From now on give pieces that are one whole event to `write`, and only others to the receiver."""
        self._events_to = write

    @property
    def paused(self) -> bool:
        """Whether reading is paused because the client does not read."""
        return self._paused

    def pause(self) -> None:
        """Pause reading; does nothing when the answer has ended, since the connection may serve another."""
        if self._receiver is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._discard(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._head and self._head.framing == "close" and exc is None:
            self._ended(self, False)
            receiver.on_end()
        else:
            receiver.on_broken("the connection was closed" if exc is None else _said(exc))

    def data_received(self, data: bytes) -> None:
        receiver, chunked, write = self._receiver, self._chunked, self._events_to
        if receiver is None:
            self._transport.abort()  # nothing was asked: the connection cannot be trusted
        elif chunked is not None:
            size = len(data)
            if (
                write
                and chunked.at_start
                and size < USUAL
                and data.startswith(SIZE_LINES[size])
                and data.endswith(EVENT_ENDS)
            ):
                self.recent, self.latest = self.latest, data  # every token passes here, hence inlined
                write(data)
                chunked.chunks += 1
                if chunked.chunks % BOOKED == 0:
                    receiver.on_chunks(chunked.chunks)
            else:
                self._take_chunks(receiver, chunked, data)
        elif self._head is None:
            self._take_head(receiver, self._buffer + data if self._buffer else data)
        else:
            self._take_body(receiver, self._head, data)

    def _take_chunks(self, receiver: Receiver, body: ChunkedBody, data: bytes) -> None:
        if len(data) > _LAST_CHUNK:  # else it is just the last chunk
            self.recent, self.latest = self.latest, data
        try:
            boundary = body.feed(data)
        except MalformedChunk as error:
            self.cut(str(error))
            return
        receiver.on_chunks(body.chunks)
        receiver.on_body(data[:boundary] if body.done else data, boundary)
        if body.done and self._head:
            self._finish(self._head, body.excess)

    def _take_head(self, receiver: Receiver, data: bytes) -> None:
        self.heard = True
        head = None
        start = 0
        while head is None or head.status < 200:  # 100 Continue, 103 Early Hints: the answer proper follows
            end = data.find(b"\r\n\r\n", start) + 4
            if end < 4 or self._interim > _MAX_HEAD:
                self._buffer = data[start:]
                if self._interim + len(self._buffer) > _MAX_HEAD:
                    self.cut("its answer's head is too long")
                return
            try:
                head, length = self._heads.read(data[start:end], self._head_only)
            except _NO_ANSWER:
                self.cut("its answer is not valid HTTP")
                return
            self._interim += end - start
            start = end
        data = data[start:]
        self._buffer = b""
        self._begin_body(receiver, head, length)
        if self._receiver is receiver and (data or head.framing == "empty" or length == 0):
            self._take_body(receiver, head, data)

    def _begin_body(self, receiver: Receiver, head: Head, length: int | None) -> None:
        self._head = head
        self._left = length or 0 if head.framing == "sized" else 0
        self._chunked = ChunkedBody() if head.framing == "chunked" else None
        receiver.on_head(head, length)

    def _take_body(self, receiver: Receiver, head: Head, data: bytes) -> None:
        if head.framing == "chunked":
            self.data_received(data)
            return
        self.recent, self.latest = self.latest, data
        if head.framing == "close":
            receiver.on_body(data, 0)
            return
        excess = data[self._left :]
        self._left -= len(data) - len(excess)
        if data:
            receiver.on_body(data[: len(data) - len(excess)] if excess else data, 0)
        if not self._left:
            self._finish(head, excess)

    def _finish(self, head: Head, excess: bytes) -> None:
        receiver, self._receiver = self._receiver, None
        self._chunked = self._events_to = None
        if receiver is None:
            return  # the receiver aborted while it got the last bytes
        # unsent bytes of a request that was answered early would be read as part of the next one
        usable = head.keep_alive and not excess and not self._transport.get_write_buffer_size()
        if usable:
            self.resume()  # the client may have paused it, and the next answer is to be read
        else:
            self._transport.abort()
        self._ended(self, usable)
        receiver.on_end()

    def cut(self, reason: str) -> None:
        """Close at once, and tell the receiver why."""
        receiver, self._receiver = self._receiver, None
        self._transport.abort()
        if receiver:
            receiver.on_broken(reason)


def _said(error: Exception) -> str:
    """For people: without the number that `str` puts in front."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
