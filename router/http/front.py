"""The client's side: one protocol per connection, one request at a time, answers in order.

Pipelined requests wait until the one before them is answered. A lost connection cancels the request in progress at
once. What the client sends is read by `router.http.reader`.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from router.http import protocol
from router.http.clients import READ_AHEAD, SPARE, Activity, ActivityTimer, Clients
from router.http.messages import (
    CLOSES,
    Passing,
    Request,
    Response,
    connection_line,
    write_beginning,
    write_response,
)
from router.http.origins import Origins
from router.http.reader import CONTINUE, Admit, RefuseText, RequestReader, held

MAX_PIPELINED = 16
"""Requests read ahead on one connection; beyond that reading pauses."""
LINGER = 1.0
"""Seconds for which a client may go on sending what was refused, before the connection is closed."""
_TOO_LATE = "The router is stopping, and the request was not here whole in time (--drain-timeout)."
_NO_LINGER = struct.pack("ii", 1, 0)


class Exchange(Protocol):
    """A request in progress, as the connection sees it."""

    def cancel(self) -> None:
        """The client has gone."""

    def pause(self) -> None:
        """The client reads more slowly than the worker writes."""

    def resume(self) -> None: ...


Serve = Callable[[Request, "Connection"], Exchange | None]
"""Answers a request on its connection: at once (None), or through the exchange that is returned."""
CallLater = Callable[[float, Callable[[], None]], object]


class Connection(protocol.Protocol):
    """Reads requests, passes them to `serve`, and writes the answers."""

    def __init__(
        self,
        serve: Serve,
        refuse: RefuseText,
        clients: Clients[Connection],
        call_later: CallLater,
        passing: Passing = Passing(),  # noqa: B008 -- immutable
        admit: Admit | None = None,
        origins: Origins | None = None,
    ) -> None:
        """`clients`: contains the connection while it is open. `call_later`: the event loop's. `origins`: see
        `RequestReader`."""
        self._call_later = call_later
        self._serve = serve
        self._refuse = refuse
        self._clients = clients
        self._limits = clients.limits
        self._reader = RequestReader(refuse, clients, passing, admit, origins)
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
        self._reading = True  # False: too much waits
        self._sent = 0  # requests that the client has sent
        self._at_once = 0  # requests answered at once in this turn of the event loop
        self._resting = False  # others have their turn
        # For what is read, after the answers to those that wait:
        self._refusal: Response | None = None  # it cannot be read
        self._continue_due = False  # the client waits for a word before it sends the rest

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
        self._refuse_rest(503, text)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's signature
        self._clients.open.discard(self)
        self._closing = True
        self._drop_waiting()
        exchange = self._end_current()
        if exchange:
            exchange.cancel()
        self._reader.close()

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
        if self._closing or self._refusal:
            return
        if self._reader.unread and data:  # others have their turn
            self._reader.unread += data
            return
        self._at_once = 0
        for read in self._reader.read(data):
            if isinstance(read, Request):
                self._take(read)
            elif read == CONTINUE:
                self._let_continue()
            else:
                self._refuse_with(read)
        if self.closing:  # forget what has come behind the last request
            self._reader.drop()
        if self._reader.unread:
            self._rest()

    def _read_on(self) -> None:
        if self._reading:
            self.data_received(b"")
        if self._reading and not self._reader.unread and not self._transport.is_closing():
            self._transport.resume_reading()

    def _take(self, request: Request) -> None:
        if self._closing or self._refusal:
            self._clients.buffered -= held(request.body)
            return
        self._closing, self._continue_due = self._last, False
        self._sent += 1
        if self._current is None and not self._paused and not self._resting:
            self._begin(request)
            return
        self._waiting.append(request)
        self._ahead += _size(request)
        if len(self._waiting) >= MAX_PIPELINED or self._ahead >= READ_AHEAD:
            self._pause_reading()

    def _pause_reading(self) -> None:
        self._reading = False
        self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._refusal is not None:
            return
        self._reading = True
        if not self._reader.unread:
            self._transport.resume_reading()
        else:  # later, as a request that waits may be about to begin
            self._call_later(0, self._read_on)

    def _let_continue(self) -> None:
        self._continue_due = bool(self._current or self._waiting)
        if not self._closing and not self._continue_due:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- answering

    def _begin(self, request: Request) -> None:
        self._current = request
        exchange = self._serve(request, self)
        if self._answers(request):  # else it is answered already, and the next one may have begun
            self._exchange = exchange
            return
        self._at_once += 1
        if self._at_once >= MAX_PIPELINED and not self._closing:
            self._rest()

    def _rest(self) -> None:
        """Let others have their turn: a client may send megabytes of requests that are answered at once, for which
        everybody else would wait."""
        if not self._resting:
            self._resting = True
            self._pause_reading()
            self._call_later(0, self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        self._at_once = 0
        if not self._waiting and not self._transport.is_closing():
            self._resume_reading()
        if not self._closing:
            self._begin_next()

    def _answers(self, request: Request) -> bool:
        """A function, since mypyc takes what was just assigned to be there still."""
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
                self._resume_reading()
            self._begin(request)
        self._beginning = False
        if not self._waiting and self._current is None:
            self._catch_up()

    def _catch_up(self) -> None:
        """All that came whole is answered: say what had to wait for that."""
        if self._refusal:
            refusal, self._refusal = self._refusal, None
            self._resume_reading()  # else the connection's end would be a reset
            self._refuse_with(refusal)
        elif self._continue_due:
            self._let_continue()

    def _may_begin(self) -> bool:
        return bool(self._waiting) and self._current is None and not self._paused and not self._resting

    def respond(self, response: Response) -> None:
        """Answer the current request with a whole response."""
        request = self._current
        if request is None:
            return
        keep_alive = request.head.keep_alive and not self._closing
        line = connection_line(keep_alive, request.head.http_1_0) + request.head.answer_lines
        self._transport.write(write_response(response, line, request.head.method == b"HEAD", self._clients.date))
        self.finish(keep_alive)

    def begin(self, response: Response) -> None:
        """Answer the current request, whose client knows chunks, with this head; the body follows in chunks."""
        request = self._current
        if request is not None:
            line = connection_line(request.head.keep_alive and not self._closing, http_1_0=False)
            self._transport.write(write_beginning(response, line + request.head.answer_lines, self._clients.date))

    def finish(self, keep_alive: bool) -> None:
        """The current answer is complete: go on with the next request."""
        self._end_current()
        if not keep_alive or self._closing:
            self._closing = True
            self._drop_waiting()
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
                self._refuse_rest(503, _TOO_LATE)
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

    def _refuse_rest(self, status: int, message: str) -> None:
        self._refuse_with(self._reader.named(self._refuse(status, message)))

    def _refuse_with(self, response: Response) -> None:
        """Answer a request that is not read to its end, and close, since the start of the next one is unknown."""
        if self._closing or self._refusal:
            return
        if self._waiting and self._current is None:  # what is written now would be taken for another's answer
            self._refusal = response
            self._pause_reading()
            self._reader.drop()
            return
        self._closing = True
        if self._current is None:
            self._transport.write(write_response(response, CLOSES, date=self._clients.date))
            self._linger()
        self._drop_waiting()

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
        if request is not None:
            self._clients.buffered -= held(request.body)
        return exchange

    def _drop_waiting(self) -> None:
        """Drop the waiting requests and the one being read: none will be answered."""
        self._clients.buffered -= sum(held(request.body) for request in self._waiting)
        self._waiting.clear()
        self._ahead = 0
        self._reader.drop()

    # -- time

    def tick(self, now: float) -> None:
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
                self._refuse_rest(408, text)
            case "idle" if seconds >= limits.keep_alive_timeout:
                self.drain()

    def _activity(self) -> Activity:
        unsent = self._transport.get_write_buffer_size()
        if unsent and (self._paused or self._current is None):  # else the answer is still being written
            return Activity("taking", unsent + self._in_kernel())
        if self._being_sent:
            return Activity("sending", self._sent)
        return Activity("idle" if self._current is None else "busy", self._sent)

    def _in_kernel(self) -> int:
        """Bytes that the kernel has taken and the client has not. These may be megabytes, and it takes more only when
        much of them is gone: a client that reads little at a time would seem to read nothing."""
        sock = self._transport.get_extra_info("socket")
        try:
            return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder) if sock else 0
        except (OSError, ValueError):  # closed, or a system that does not tell
            return 0

    @property
    def _being_sent(self) -> bool:
        """Whether a request has arrived in part."""
        return (self._reading or self._resting) and not self._closing and self._reader.in_part


def _size(request: Request) -> int:
    head = request.head
    return len(request.body) + len(head.target) + sum(len(name) + len(value) for name, value in head.headers)
