"""One request on its way: to a worker, on to another if the first fails before anything was sent back, and home again.

Callbacks, not a task: a relayed piece costs one call. The exchange owns the reservation and releases it exactly once,
whatever happens: the answer's end, a worker's failure, the client's leaving.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from router.fleet import Worker
from router.http.front import Connection
from router.http.messages import REQUEST_ID, Request, Response
from router.http.relay import Relay, relay_for
from router.http.upstream import Head, WorkerConnection
from router.openai_errors import error_event, error_response
from router.scheduling.booking import Booking
from router.scheduling.decision import Decision

RETRIES = 1
"""Other workers tried after the first, before anything was sent to the client."""
RETRY_STATUSES = frozenset((500, 502, 503))
_ERRORS = 400
"""From this status on an answer is none."""
_USAGE_WINDOW = 4096
"""Bytes at an answer's end in which its usage is looked for."""
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
# Text inside a JSON string has its quotes escaped, so neither pattern can match what a model generated.
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')

End = Literal["complete", "broken", "cancelled", "failed"]


class Leg(NamedTuple):
    """One attempt: the worker, why it was chosen, what was booked there, header lines for it and for its answer."""

    worker: Worker
    decision: Decision
    reservation: Booking
    header_lines: bytes
    answer_lines: bytes = b""


class Outcome(NamedTuple):
    """What became of a request; times in seconds since it was read, None where it never came to that."""

    leg: Leg | None
    status: int
    end: End
    first_byte: float | None
    duration: float
    prompt_tokens: int | None
    cached_tokens: int | None
    """As the engine reported them."""


class Routing(Protocol):
    """What an exchange asks of the router around it."""

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Response], None]) -> None:
        """Choose and book a worker outside `exclude`, or say why there is none: at once, or later."""

    def withdraw(self) -> None:
        """What was asked for with `route` is wanted no more."""

    def can_retry(self, exclude: frozenset[str]) -> bool:
        """Whether `route` would find one."""

    def failed(self, worker: Worker, reason: str, retried: bool, unreachable: bool = False) -> None:
        """A worker failed this request: could not be reached, broke off, or answered 5xx."""

    def finished(self, outcome: Outcome) -> None: ...


class Exchange:
    """Implements `front.Exchange` towards the client and `upstream.Receiver` towards the worker."""

    __slots__ = (
        "_began",
        "_chunks",
        "_clock",
        "_connecting",
        "_connection",
        "_first_byte",
        "_head",
        "_leg",
        "_length",
        "_over",
        "_relay",
        "_request",
        "_request_id",
        "_reused",
        "_routing",
        "_tried",
        "_upstream",
    )

    def __init__(
        self, request: Request, request_id: bytes, connection: Connection, routing: Routing, clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._request_id = request_id
        self._connection = connection
        self._routing = routing
        self._clock = clock
        self._began = clock()
        self._tried: frozenset[str] = _NOBODY
        self._leg: Leg | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: WorkerConnection | None = None
        self._reused = False
        self._first_byte: float | None = None
        self._over = False
        self._reset_answer()

    def __repr__(self) -> str:
        where = self._leg.worker.id if self._leg else "nowhere"
        return (
            f"<Exchange at {where}, {'answering' if self._first_byte else 'waiting'}{', over' if self._over else ''}>"
        )

    def _reset_answer(self) -> None:
        self._head: Head | None = None
        self._length: int | None = None
        self._relay: Relay | None = None
        self._chunks = 0

    # -- to the worker

    def start(self) -> None:
        """Choose a worker and send the request; nothing, when the client has gone meanwhile."""
        if self._over:
            return
        self._routing.route(self._tried, self._on_routed)

    def _on_routed(self, leg: Leg | Response) -> None:
        if isinstance(leg, Response):
            self.answer(leg)
            return
        self._leg = leg
        self._connect(leg, fresh=False)

    def _connect(self, leg: Leg, *, fresh: bool) -> None:
        self._reset_answer()
        pool = leg.worker.pool
        idle = None if fresh else pool.take_idle()
        if idle:
            self._on_connection(idle)
        else:
            self._upstream = None
            self._connecting = pool.connect(self._on_connection, self._on_no_connection)

    def _on_connection(self, upstream: WorkerConnection) -> None:
        leg, request = self._leg, self._request
        if self._over or leg is None:
            upstream.abort()
            return
        self._upstream = upstream
        self._reused = upstream.requests > 0
        upstream.send(self, _request_head(request, self._request_id, leg), request.body, request.head.method == b"HEAD")

    def _on_no_connection(self, reason: str) -> None:
        if not self._over:
            self._give_up_on_worker(f"cannot be reached: {reason}", unreachable=True)

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:
        if head.status in RETRY_STATUSES and self._may_retry() and self._upstream:
            self._upstream.abort()
            self._give_up_on_worker(f"answered {head.status}")
            return
        self._head = head
        self._length = length
        self._relay = relay_for(head, self._request.head.http_1_0)

    def on_body(self, data: bytes, boundary: int) -> None:
        leg, head, relay, upstream = self._leg, self._head, self._relay, self._upstream
        if leg is None or head is None or relay is None or upstream is None:
            return
        out = relay.body(data, boundary)
        if self._first_byte is None:
            out = self._begin_answer(leg, head, relay) + out
        if out:
            self._connection.write(out)
        upstream.pass_events(self._connection.write if relay.clean else None)

    def on_chunks(self, chunks: int) -> None:
        if self._leg:
            self._leg.reservation.generated(chunks - self._chunks, self._clock())
        self._chunks = chunks

    def on_end(self) -> None:
        leg, head, relay = self._leg, self._head, self._relay
        if leg is None or head is None or relay is None:
            return
        out = relay.end()
        if self._first_byte is None:
            out = self._begin_answer(leg, head, relay) + out
        if out:
            self._connection.write(out)
        self._finish(head.status, "complete")
        self._connection.finish(self._request.head.keep_alive and not relay.until_close)

    def on_broken(self, reason: str) -> None:
        if self._first_byte is not None:
            self._break_answer(reason)
        elif self._reused and self._head is None and self._leg:
            # The worker closed an idle connection just as it was reused: no sign that it is in trouble.
            self._reused = False
            self._connect(self._leg, fresh=True)
        else:
            self._give_up_on_worker(f"broke off before its first byte: {reason}")

    # -- front.Exchange

    def cancel(self) -> None:
        if self._over:
            return
        self._routing.withdraw()
        if self._connecting:
            self._connecting.cancel()
        if self._upstream:
            self._upstream.abort()
        self._finish(499, "cancelled")

    def pause(self) -> None:
        if self._upstream:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream:
            self._upstream.resume()

    # -- inside

    def _begin_answer(self, leg: Leg, head: Head, relay: Relay) -> bytes:
        """The first byte is here: the prefill is done, and there is no way back to another worker."""
        now = self._clock()
        self._first_byte = now - self._began
        if head.status < _ERRORS:
            leg.reservation.first_token(now)
        else:  # a refusal tells nothing of how long a prompt takes
            leg.reservation.assume_first_token(now)
        keep_alive = self._request.head.keep_alive and not relay.until_close and not self._connection.closing
        length = b"" if self._length is None else b"content-length: %d\r\n" % self._length
        framing = length + relay.framing if keep_alive else b"%sconnection: close\r\n" % (length + relay.framing)
        return _response_head(head, leg, self._request_id, framing)

    def _break_answer(self, reason: str) -> None:
        leg, relay = self._leg, self._relay
        if leg is None or relay is None:
            return
        last = relay.broken(error_event(502, f"Worker {leg.worker.id} broke off its answer: {reason}."))
        self._routing.failed(leg.worker, f"broke off its answer: {reason}", retried=False)
        self._finish(502, "broken")
        if last is None:
            self._connection.abort()
        else:
            self._connection.write(last)
            self._connection.finish(self._request.head.keep_alive)

    def _may_retry(self) -> bool:
        leg = self._leg
        return leg is not None and len(self._tried) < RETRIES and self._routing.can_retry(self._tried | {leg.worker.id})

    def _give_up_on_worker(self, reason: str, *, unreachable: bool = False) -> None:
        leg = self._leg
        if leg is None:
            return
        retry = self._may_retry()
        leg.reservation.release(self._clock())
        self._routing.failed(leg.worker, reason, retry, unreachable)
        if retry:
            self._tried |= {leg.worker.id}
            self.start()
        else:
            self.answer(error_response(502, f"Worker {leg.worker.id} {reason}."))

    def answer(self, response: Response) -> None:
        """End the request with an answer of the router's own."""
        if self._over:
            return
        self._finish(response.status, "failed")
        named = (*response.headers, (REQUEST_ID, self._request_id))
        self._connection.respond(response._replace(headers=named))

    def _finish(self, status: int, end: End) -> None:
        self._over = True
        upstream, self._upstream = self._upstream, None
        now = self._clock()
        if self._leg:
            self._leg.reservation.release(now)
        complete = upstream if end == "complete" else None
        prompt, cached = _usage(complete.recent, complete.latest) if complete else (None, None)
        self._routing.finished(Outcome(self._leg, status, end, self._first_byte, now - self._began, prompt, cached))


_NOBODY: frozenset[str] = frozenset()
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))


def _usage(recent: bytes, latest: bytes) -> tuple[int | None, int | None]:
    """(prompt tokens, cached tokens) from an answer's last bytes; None for what they do not tell."""
    end = latest[-_USAGE_WINDOW:] if len(latest) > _USAGE_WINDOW else recent[-_USAGE_WINDOW:] + latest
    start = end.rfind(b'"usage"')
    prompt = _PROMPT.search(end, start) if start >= 0 else None
    if not prompt:
        return None, None
    cached = _CACHED.search(end, start)
    return int(prompt[1]), int(cached[1]) if cached else None


def _request_head(request: Request, request_id: bytes, leg: Leg) -> bytes:
    head, address = request.head, leg.worker.pool.address
    length = b""
    if request.body or head.method in _WITH_BODY:
        length = b"content-length: %d\r\n" % len(request.body)
    return b"%s %s%s HTTP/1.1\r\n%shost: %s\r\nx-request-id: %s\r\n%s%s\r\n" % (
        head.method,
        address.base,
        head.target,
        head.passed_on,
        address.authority,
        request_id,
        leg.header_lines,
        length,
    )


def _response_head(head: Head, leg: Leg, request_id: bytes, framing: bytes) -> bytes:
    overlap = leg.decision.overlap_tokens
    told = leg.answer_lines if overlap is None else b"x-router-overlap-tokens: %d\r\n%s" % (overlap, leg.answer_lines)
    named = leg.worker.id.encode()
    return b"%sx-request-id: %s\r\nx-router-worker: %s\r\n%s%s\r\n" % (head.passed_on, request_id, named, told, framing)
