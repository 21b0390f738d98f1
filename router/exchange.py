"""One request on its way: to a worker, on to another if the first fails before anything was sent back, and home again.

Callbacks, not a task: a relayed piece costs one call. The exchange owns the reservation and releases it exactly once,
whatever happens: the answer's end, a worker's failure, the client's leaving.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from router.fleet import Worker
from router.http.front import Connection
from router.http.messages import Headers, Request, Response, end_to_end, header_lines, status_line
from router.http.relay import Relay, relay_for
from router.http.upstream import Head, Lease, WorkerConnection
from router.openai_errors import error_event, error_response
from router.scheduling.decision import Decision
from router.scheduling.load import Reservation

RETRIES = 1
"""Other workers tried after the first, before anything was sent to the client."""
RETRY_STATUSES = frozenset((500, 502, 503))
_USAGE_WINDOW = 4096
"""Bytes at an answer's end in which its usage is looked for."""
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
# Text inside a JSON string has its quotes escaped, so neither pattern can match what a model generated.
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')

End = Literal["complete", "broken", "cancelled", "failed"]


class Leg(NamedTuple):
    """One attempt: the worker, why it was chosen, what was booked there, headers that only it gets."""

    worker: Worker
    decision: Decision
    reservation: Reservation
    headers: Headers


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

    def route(self, exclude: frozenset[str]) -> Leg | Response:
        """Choose and book a worker outside `exclude`, or say why there is none."""

    def can_retry(self, exclude: frozenset[str]) -> bool:
        """Whether `route` would find one."""

    def failed(self, worker: Worker, reason: str, retried: bool, unreachable: bool = False) -> None:
        """A worker failed this request: could not be reached, broke off, or answered 5xx."""

    def finished(self, outcome: Outcome) -> None: ...


class Exchange:
    """Implements `front.Exchange` towards the client and `upstream.Receiver` towards the worker."""

    def __init__(
        self, request: Request, request_id: bytes, connection: Connection, routing: Routing, clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._request_id = request_id
        self._connection = connection
        self._routing = routing
        self._clock = clock
        self._began = clock()
        self._tried: frozenset[str] = frozenset()
        self._leg: Leg | None = None
        self._lease: Lease | None = None
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
        self._relay: Relay | None = None
        self._chunks = 0
        self._recent = b""
        self._latest = b""

    # -- to the worker

    def start(self) -> None:
        """Choose a worker and send the request; nothing, when the client has gone meanwhile."""
        if self._over:
            return
        leg = self._routing.route(self._tried)
        if isinstance(leg, Response):
            self.answer(leg)
            return
        self._leg = leg
        self._connect(leg, fresh=False)

    def _connect(self, leg: Leg, *, fresh: bool) -> None:
        self._reset_answer()
        self._upstream = None
        self._lease = leg.worker.pool.take(self._on_connection, self._on_no_connection, fresh)

    def _on_connection(self, upstream: WorkerConnection) -> None:
        leg = self._leg
        if self._over or leg is None:
            upstream.abort()
            return
        self._upstream = upstream
        self._reused = upstream.requests > 0
        head_only = self._request.method == b"HEAD"
        head = _request_head(self._request, self._request_id, leg)
        upstream.send(self, [head, self._request.body] if self._request.body else [head], head_only)

    def _on_no_connection(self, reason: str) -> None:
        if not self._over:
            self._give_up_on_worker(f"cannot be reached: {reason}", unreachable=True)

    # -- upstream.Receiver

    def on_head(self, head: Head) -> None:
        if head.status in RETRY_STATUSES and self._may_retry() and self._upstream:
            self._upstream.abort()
            self._give_up_on_worker(f"answered {head.status}")
            return
        self._head = head
        self._relay = relay_for(head, self._request.http_1_0)

    def on_body(self, data: bytes, boundary: int) -> None:
        leg, head, relay = self._leg, self._head, self._relay
        if leg is None or head is None or relay is None:
            return
        if head.chunked:
            leg.reservation.generated(head.chunked.chunks - self._chunks)
            self._chunks = head.chunked.chunks
        self._recent, self._latest = self._latest, data
        out = relay.body(data, boundary)
        if self._first_byte is None:
            out = self._begin_answer(leg, head, relay) + out
        if out:
            self._connection.write(out)

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
        self._connection.finish(self._request.keep_alive and not relay.until_close)

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
        if self._lease:
            self._lease.cancel()
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
        self._first_byte = self._clock() - self._began
        leg.reservation.first_token()
        keep_alive = self._request.keep_alive and not relay.until_close and not self._connection.closing
        return _response_head(head, leg, relay, self._request_id, keep_alive)

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
            self._connection.finish(self._request.keep_alive)

    def _may_retry(self) -> bool:
        leg = self._leg
        return leg is not None and len(self._tried) < RETRIES and self._routing.can_retry(self._tried | {leg.worker.id})

    def _give_up_on_worker(self, reason: str, *, unreachable: bool = False) -> None:
        leg = self._leg
        if leg is None:
            return
        retry = self._may_retry()
        leg.reservation.release()
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
        named = (*response.headers, (b"x-request-id", self._request_id))
        self._connection.respond(response._replace(headers=named))

    def _finish(self, status: int, end: End) -> None:
        self._over = True
        self._upstream = None
        if self._leg:
            self._leg.reservation.release()
        prompt, cached = _usage(self._recent, self._latest) if end == "complete" else (None, None)
        duration = self._clock() - self._began
        self._routing.finished(Outcome(self._leg, status, end, self._first_byte, duration, prompt, cached))


def _usage(recent: bytes, latest: bytes) -> tuple[int | None, int | None]:
    """(prompt tokens, cached tokens) from an answer's last bytes; None for what they do not tell."""
    end = recent[-_USAGE_WINDOW:] + latest[-_USAGE_WINDOW:]
    prompt, cached = _PROMPT.search(end), _CACHED.search(end)
    return (int(prompt[1]) if prompt else None, int(cached[1]) if cached else None)


_TARGET_WORKER = b"x-router-target-worker"
_OWN_REQUEST_HEADERS = frozenset((b"host", b"content-length", b"expect", b"x-request-id", _TARGET_WORKER))
_OWN_RESPONSE_HEADERS = frozenset((b"x-request-id", b"x-router-worker", b"x-router-overlap-tokens"))


def _request_head(request: Request, request_id: bytes, leg: Leg) -> bytes:
    address = leg.worker.pool.address
    headers = [header for header in end_to_end(request.headers) if header[0] not in _OWN_REQUEST_HEADERS]
    headers += [(b"host", address.authority), (b"x-request-id", request_id), *leg.headers]
    if request.body or request.method in {b"POST", b"PUT", b"PATCH"}:
        headers.append((b"content-length", b"%d" % len(request.body)))
    return b"%s %s%s HTTP/1.1\r\n%s\r\n" % (request.method, address.base, request.target, header_lines(headers))


def _response_head(head: Head, leg: Leg, relay: Relay, request_id: bytes, keep_alive: bool) -> bytes:
    headers = [header for header in end_to_end(head.headers) if header[0] not in _OWN_RESPONSE_HEADERS]
    if head.chunked:  # RFC 9112 section 6.3: the transfer coding wins over a stated length
        headers = [header for header in headers if header[0] != b"content-length"]
    headers += [(b"x-request-id", request_id), (b"x-router-worker", leg.worker.id.encode())]
    if leg.decision.overlap_tokens is not None:
        headers.append((b"x-router-overlap-tokens", b"%d" % leg.decision.overlap_tokens))
    close = b"" if keep_alive else b"connection: close\r\n"
    return status_line(head.status) + header_lines(headers) + relay.framing + close + b"\r\n"
