"""The client's side: one protocol per connection, one request at a time, answers in order.

Pipelined requests wait until the one before them is answered. A lost connection cancels the request in progress at
once. A head like the last one is not parsed again (`router.http.repeated`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from router.http import protocol
from router.http.clients import LARGE, READ_AHEAD, SPARE, Activity, ActivityTimer, Clients
from router.http.messages import (
    CAME_BACK,
    CLOSES,
    REQUEST_ID,
    VIA,
    Headers,
    Passing,
    Request,
    RequestHead,
    Response,
    connection_line,
    first,
    header_lines,
    origin_form,
    request_head,
    with_request_id,
    write_response,
)
from router.http.repeated import RepeatedRequest, repeated_request

MAX_HEAD = 64 * 1024
"""Most bytes of request line and headers, or of trailers; more is answered with 431."""
MAX_PIPELINED = 16
"""Requests read ahead on one connection; beyond that reading pauses."""
PIECES = 1024
"""Most pieces in which a body is kept, plus one for each 256 bytes of it: each piece takes some 50 bytes itself."""
LINGER = 1.0
"""Seconds for which a client may go on sending what was refused, before the connection is closed."""
_TOO_LATE = "The router is stopping, and the request was not here whole in time (--drain-timeout)."
_CAME_BACK_TEXT = (
    "The request has come back to this router: one of its workers, or of a router behind it, is this router itself. "
    "A worker's URL must lead to an engine."
)
_NO_LINGER = struct.pack("ii", 1, 0)
_MOST_MISSES = 4
"""Heads in a row, each unlike the one before, after which a connection's heads are no longer remembered."""


class Exchange(Protocol):
    """A request in progress, as the connection sees it."""

    def cancel(self) -> None:
        """The client has gone."""

    def pause(self) -> None:
        """The client reads more slowly than the worker writes."""

    def resume(self) -> None: ...


Serve = Callable[[Request, "Connection"], Exchange | None]
"""Answers a request on its connection: at once (None), or through the exchange that is returned."""
RefuseText = Callable[[int, str], Response]
"""Makes the answer (status, message) to a request that cannot be read."""
Admit = Callable[[bytes, Headers], Response | None]
"""None if a request with this target and these headers may send its body; else the answer to it."""
CallLater = Callable[[float, Callable[[], None]], object]


class Connection(protocol.Protocol):
    """Reads requests, passes them to `serve`, and writes the answers."""

    __deletable__ = ("_parser",)  # for mypyc

    def __init__(
        self,
        serve: Serve,
        refuse: RefuseText,
        clients: Clients[Connection],
        call_later: CallLater,
        passing: Passing = Passing(),  # noqa: B008 -- immutable
        admit: Admit | None = None,
    ) -> None:
        """`clients`: contains the connection while it is open. `call_later`: the event loop's."""
        self._call_later = call_later
        self._serve = serve
        self._refuse = refuse
        self._clients = clients
        self._limits = clients.limits
        self._passing = passing
        self._admit = admit
        self._transport: asyncio.Transport
        self.write: Callable[[bytes], None]
        """Writes a piece of the current answer."""
        self._closing = False  # no further request will be answered
        self._last = False  # the request being read is the last
        self._activity_timer = ActivityTimer()
        # The request in progress, and those behind it:
        self._current: Request | None = None
        self._exchange: Exchange | None = None
        self._paused = False  # the client does not take the answer
        self._waiting: deque[Request] = deque()
        self._ahead = 0  # bytes of the waiting requests
        self._beginning = False  # `_begin_next` is under way
        # The request being read:
        self._reading = True  # False: too much waits
        self._sent = 0  # requests that the client has sent
        self._parser = httptools.HttpRequestParser(self)
        self._between = True  # the parser is between two messages
        self._begins = b""  # the first piece of the message being parsed
        self._repeated: RepeatedRequest | None = None
        self._misses = 0  # heads in a row that were unlike the remembered one
        self._missing = 0  # bytes still to come of a body that bypasses the parser
        self._counted = 0  # bytes of its body that are counted in `clients.buffered`
        self._body: list[bytes] = []
        self._reset_message()

    def __repr__(self) -> str:
        return f"<Connection {'busy' if self._current else 'idle'}, {len(self._waiting)} waiting>"

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, its answer is not sent out yet, or the last request is still being read."""
        reads_last = self._last and not self._closing
        return self._current is not None or reads_last or self._transport.get_write_buffer_size() > 0

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        clients = self._clients
        clients.open.add(self)
        if len(clients.open) > self._limits.max_connections:
            self._turn_away()

    def _turn_away(self) -> None:
        self._clients.refused["max_connections"] += 1
        if len(self._clients.open) > self._limits.max_connections + SPARE:
            self.abort()
            return
        text = f"The router has as many connections as it may ({self._limits.max_connections}); try again later."
        self._refuse_message(503, text)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's signature
        self._clients.open.discard(self)
        self._closing = True
        self._drop_waiting()
        exchange = self._end_current()
        if exchange:
            exchange.cancel()
        del self._parser  # it refers to this object: the cycle would wait for the garbage collector

    def pause_writing(self) -> None:
        self._paused = True
        if self._exchange:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._exchange:
            self._exchange.resume()
        self._begin_next()

    def data_received(self, data: bytes) -> None:
        if self._missing:
            data = self._take_missing(data)
        elif self._between and self._repeated:
            data = self._take_repeated(self._repeated, data)
        if not data or self._closing:
            return
        self._begins = data if self._between else self._begins
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if not self._closing:
                self._refuse_message(400, f"The request is not valid HTTP: {error}.")

    def _take_repeated(self, repeated: RepeatedRequest, data: bytes) -> bytes:
        """Reads a request whose head is like the last one. Returns what is left to parse."""
        found = repeated.find(data)
        if not found or found[1] > self._limits.max_body:
            self._misses += 1
            self._repeated = None
            return data
        self._misses = 0
        start, length = found
        body = data[start : start + length]
        if len(body) < length:
            self._missing = length - len(body)
            self._body, self._body_size = [body], len(body)
            self._count()
            return b""
        self._complete(repeated.head, body)
        return data[start + length :]

    def _take_missing(self, data: bytes) -> bytes:
        """Reads more of a body. Returns what follows the body."""
        rest = data[self._missing :]
        self._body.append(data[: self._missing] if rest else data)
        self._missing -= len(self._body[-1])
        self._body_size += len(self._body[-1])
        self._count()
        if not self._missing and self._repeated:
            pieces, self._body = self._body, []
            self._body_size = 0
            self._complete(self._repeated.head, b"".join(pieces))
        return rest

    def _feed(self, data: bytes) -> None:
        while data and not self._closing:  # the parser stops behind each offer to upgrade
            self._no_content += len(data)
            data = self._parse(data)
        if self._no_content > MAX_HEAD and not self._closing:
            part = "trailer" if self._headers_done else "head"
            self._refuse_message(431, f"The request's {part} is larger than {MAX_HEAD} bytes.")

    def _parse(self, data: bytes) -> bytes:
        """Feeds the parser. Returns what is left to parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def _decline_upgrade(self) -> None:
        """Read a message with an offer to switch protocols again, without the offer. (An answer alone declines it, but
        the parser ends such a message with its head, and would take its body for the next request.)"""
        declined, self._parser = self._parser, httptools.HttpRequestParser(self)
        if self._between:  # CONNECT, which has no body
            return
        line = b"%s %s HTTP/%s\r\n" % (declined.get_method(), self._target, declined.get_http_version().encode())
        head = line + header_lines(header for header in self._headers if header[0] != b"upgrade") + b"\r\n"
        self._reset_message()
        self._begins = b""  # this head was changed, and must not be recognised again
        self._parser.feed_data(head)

    @property
    def _offers_upgrade(self) -> bool:
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self._between = False

    def _reset_message(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._body = []
        self._body_size = 0
        self._no_content = 0  # bytes outside of bodies since the last one: the parser takes lines of any length
        self._headers_done = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:  # trailers are not headers: RFC 9110 section 6.5.1
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._headers_done = True
        self._no_content = 0
        if self._offers_upgrade:
            return
        if fault := _fault(self._parser.get_http_version(), [name for name, _ in self._headers]):
            self._refuse_message(400, fault)
            return
        if sum(len(name) + len(value) + 4 for name, value in self._headers) + len(self._target) > MAX_HEAD:
            self._refuse_message(431, f"The request's head is larger than {MAX_HEAD} bytes.")
            return
        if not self._target.startswith(b"/"):
            self._target = origin_form(self._target)
        if self._admit is not None and (refusal := self._admit(self._target, self._headers)):
            self._refuse_with(refusal)
            return
        for name, value in self._headers:
            self._heed(name, value)

    def _heed(self, name: bytes, value: bytes) -> None:
        if name == b"content-length" and int(value) > self._limits.max_body:
            self._refuse_body()
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            self._refuse_message(501, "Of transfer codings only chunked is understood.")
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._refuse_message(415, "The body is compressed, which engines do not take; send it as it is.")
        elif name == VIA and self._passing.router_id and self._passing.router_id in value:
            self._refuse_message(CAME_BACK, _CAME_BACK_TEXT)
        elif name == b"expect" and value.lower() == b"100-continue":
            self._let_continue()

    def _let_continue(self) -> None:
        """HTTP/1.0 clients do not know interim answers, even if they ask for one: RFC 9110 section 10.1.1."""
        if not self._closing and not self._current and self._parser.get_http_version() != "1.0":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._no_content = 0
        self._body_size += len(body)
        if self._body_size > self._limits.max_body:
            self._refuse_body()
        elif not self._closing:
            self._body.append(body)
            if len(self._body) > PIECES + self._body_size // 256:
                self._body = [b"".join(self._body)]
            self._count()

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._between = True
        if self._closing:
            return
        parser = self._parser
        http_1_0 = parser.get_http_version() == "1.0"
        keep_alive = parser.should_keep_alive()
        head = request_head(parser.get_method(), self._target, self._headers, keep_alive, http_1_0, self._passing)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._repeated = repeated_request(self._begins, head) if self._misses < _MOST_MISSES else None
        self._begins = b""
        self._reset_message()
        self._complete(head, body)

    def _complete(self, head: RequestHead, body: bytes) -> None:
        if self._closing:
            return
        self._closing = self._last
        request = Request(head, body)
        self._sent += 1
        if len(body) > LARGE:
            self._clients.buffered += len(body) - self._counted
            self._counted = 0
        if self._current is None and not self._paused:
            self._begin(request)
            return
        self._waiting.append(request)
        self._ahead += _size(request)
        if len(self._waiting) >= MAX_PIPELINED or self._ahead >= READ_AHEAD:
            self._reading = False
            self._transport.pause_reading()

    # -- answering

    def _begin(self, request: Request) -> None:
        self._current = request
        exchange = self._serve(request, self)
        if self._answers(request):  # else it is answered already, and the next one may have begun
            self._exchange = exchange

    def _answers(self, request: Request) -> bool:
        return self._current is request

    def _begin_next(self) -> None:
        """Begin the next request, but only when the client has taken the answers before, which would pile up here. Not
        recursive, since many small requests may be waiting that are answered at once."""
        if self._beginning:
            return
        self._beginning = True
        while self._may_begin():
            request = self._waiting.popleft()
            self._ahead -= _size(request)
            if not self._reading and len(self._waiting) < MAX_PIPELINED and self._ahead < READ_AHEAD:
                self._reading = True
                self._transport.resume_reading()
            self._begin(request)
        self._beginning = False

    def _may_begin(self) -> bool:
        return bool(self._waiting) and self._current is None and not self._paused

    def respond(self, response: Response) -> None:
        """Answer the current request with a whole response."""
        request = self._current
        if request is None:
            return
        keep_alive = request.head.keep_alive and not self._closing
        line = connection_line(keep_alive, request.head.http_1_0)
        self._transport.write(write_response(response, line, request.head.method == b"HEAD"))
        self.finish(keep_alive)

    def finish(self, keep_alive: bool = True) -> None:
        """The current answer is complete: go on with the next request."""
        self._end_current()
        if not keep_alive or self._closing:
            self._closing = True
            self._close()
            return
        self._begin_next()

    def abort(self) -> None:
        """Break the connection, so that the client cannot take an incomplete answer for complete."""
        if self._current:
            self._reset_when_closed()
        exchange = self._end_current()
        self._closing = True
        self._transport.abort()
        if exchange:
            exchange.cancel()

    def _reset_when_closed(self) -> None:
        """If the connection's end is the answer's end, only a reset shows that the answer is incomplete."""
        sock = self._transport.get_extra_info("socket")
        if sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    @property
    def closing(self) -> bool:
        """Whether no further request will be answered here."""
        return self._closing

    def drain(self) -> None:
        """Close now if idle, else after the request in progress or being read. At a second call a request that is still
        being read is refused."""
        if self._being_sent and self._current is None and not self._waiting:
            if self._last:
                self._refuse_message(503, _TOO_LATE)
            self._last = True
            return
        self._closing = True
        self._drop_waiting()
        if self._current is None:
            self._close()

    def _close(self) -> None:
        """Close once: after a second close, asyncio's TLS transports no longer report unsent bytes."""
        if not self._transport.is_closing():
            self._transport.close()

    def _refuse_body(self) -> None:
        self._refuse_message(413, f"The request's body is larger than {self._limits.max_body} bytes (--max-body-size).")

    def _refuse_message(self, status: int, message: str) -> None:
        self._refuse_with(self._refuse(status, message))

    def _refuse_with(self, response: Response) -> None:
        """Answer a request that is not read to its end, and close, since the start of the next one is unknown."""
        if self._closing:
            return
        self._closing = True
        if self._current is None:
            self._transport.write(write_response(self._named(response), CLOSES))
            self._linger()
        self._drop_waiting()

    def _named(self, response: Response) -> Response:
        """Add the id of the request that is being read, if its head is complete."""
        if self._headers_done:
            return with_request_id(response, first(self._headers, REQUEST_ID))
        if self._repeated and (self._missing or self._body_size):
            return with_request_id(response, self._repeated.head.request_id)
        return response

    def _linger(self) -> None:
        """Close in two steps: closing with unread input would reset the connection, and the client would lose the
        answer."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._call_later(LINGER, self._close)

    # -- what it holds

    def _end_current(self) -> Exchange | None:
        request, exchange = self._current, self._exchange
        self._current = self._exchange = None
        if request is not None and len(request.body) > LARGE:
            self._clients.buffered -= len(request.body)
        return exchange

    def _drop_waiting(self) -> None:
        """Drop the waiting requests and the one being read: none will be answered."""
        sizes = (len(request.body) for request in self._waiting)
        self._clients.buffered -= self._counted + sum(size for size in sizes if size > LARGE)
        self._waiting.clear()
        self._body.clear()
        self._counted = self._ahead = self._missing = 0

    def _count(self) -> None:
        """Count a large body in `clients.buffered`, and refuse it if there is no room."""
        if self._body_size > LARGE and not self._closing:
            self._clients.buffered += self._body_size - self._counted
            self._counted = self._body_size
            if self._clients.buffered > self._limits.max_buffered:
                self._clients.refused["max_buffered"] += 1
                text = "The router holds as many bytes of requests as it may (--max-buffered); try again in a second."
                self._refuse_with(self._refuse(429, text)._replace(headers=((b"retry-after", b"1"),)))

    # -- time

    def look(self, now: float) -> None:
        """Called once a second: end what has taken too long."""
        activity = self._activity()
        seconds, limits = self._activity_timer.seconds(activity, now), self._limits
        match activity.what:
            case "taking" if seconds >= limits.client_timeout:
                self._clients.refused["slow_answer"] += 1
                self.abort()
            case "sending" if seconds >= limits.client_timeout:
                self._clients.refused["slow_request"] += 1
                text = f"The request did not come whole within {limits.client_timeout:g} s; send it again, faster."
                self._refuse_message(408, text)
            case "idle" if seconds >= limits.keep_alive_timeout:
                self.drain()

    def _activity(self) -> Activity:
        unsent = self._transport.get_write_buffer_size()
        if unsent and (self._paused or self._current is None):  # else the answer is still being written
            return Activity("taking", unsent)
        if self._being_sent:
            return Activity("sending", self._sent)
        return Activity("idle" if self._current is None else "busy", self._sent)

    @property
    def _being_sent(self) -> bool:
        """Whether a request has arrived in part."""
        return self._reading and not self._closing and bool(self._missing or not self._between)


def _size(request: Request) -> int:
    head = request.head
    return len(request.body) + len(head.target) + sum(len(name) + len(value) for name, value in head.headers)


def _fault(version: str, names: list[bytes]) -> str | None:
    """Faults that the parser accepts, but that other parsers may read differently (request smuggling)."""
    if version not in {"1.0", "1.1"}:
        return f"HTTP/{version} is not spoken here."
    if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):  # RFC 9112 section 3.2
        return "A request must have one Host header."
    if version == "1.0" and b"transfer-encoding" in names:  # RFC 9112 section 6.1
        return "HTTP/1.0 knows no transfer codings."
    return None
