"""One request on its way: to a worker, on to another if the first fails before anything was sent back, and home again.

Callbacks, not a task: a relayed piece costs one call. The exchange owns the reservation and releases it exactly once,
whatever happens: the answer's end, a worker's failure, the client's leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from engines.disaggregation.answer import Prefilled
from router.http.edited import EditedBody, EditedEvents
from router.http.front import Connection
from router.http.messages import REQUEST_ID, Request, Response
from router.http.relay import Relay, relay_for
from router.http.upstream import Head, WorkerConnection
from router.legs import Leg, Pair, Parted, request_head, response_head
from router.openai_errors import error_event, error_response
from router.opening import Opening
from router.prefill_leg import PrefillLeg
from router.scheduling.booking import DecodeBooking
from router.usage import CACHED, read_usage, with_cached

RETRIES = 1
"""Other workers tried after the first, before anything was sent to the client."""
RETRY_STATUSES = frozenset((500, 502, 503))
_ERRORS = 400
"""From this status on an answer is none."""

End = Literal["complete", "broken", "cancelled", "failed"]


class Outcome(NamedTuple):
    """What became of a request; times in seconds since it was read, None where it never came to that."""

    leg: Leg | None
    status: int
    end: End
    first_byte: float | None
    duration: float
    prompt_tokens: int | None
    cached_tokens: int | None
    """As the engine reported them: the one that prefilled, where another decoded."""
    parted: Parted | None = None


class Routing(Protocol):
    """What an exchange asks of the router around it."""

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Pair | Response], None]) -> None:
        """Choose and book a worker outside `exclude`, or two, or say why there is none: at once, or later."""

    def go_on(self, prefill: Leg, answer: Prefilled, exclude: frozenset[str]) -> Leg | str:
        """Choose and book the worker that decodes what `prefill` computed, or say why there is none."""

    def prefilled(self, prefill: Leg, answer: Prefilled) -> None:
        """What a prefill worker has told."""

    def withdraw(self) -> None:
        """What was asked for with `route` is wanted no more."""

    def can_retry(self, exclude: frozenset[str]) -> bool:
        """Whether `route` would find one."""

    def failed(self, leg: Leg, reason: str, retried: bool, unreachable: bool = False) -> None:
        """Its worker failed this request: could not be reached, broke off, or answered 5xx."""

    def finished(self, outcome: Outcome) -> None: ...


class Exchange:
    """Implements `front.Exchange` towards the client, `upstream.Receiver` towards the worker that answers, and
    `prefill_leg.Owner` where another computes the prompt."""

    __slots__ = (
        "_began",
        "_chunks",
        "_clock",
        "_connecting",
        "_connection",
        "_excluded",
        "_first_byte",
        "_head",
        "_leg",
        "_length",
        "_opening",
        "_over",
        "_pair",
        "_pair_id",
        "_parted",
        "_prefill",
        "_prefilled_at",
        "_relay",
        "_request",
        "_request_id",
        "_retries",
        "_reused",
        "_routing",
        "_timer",
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
        self._excluded: frozenset[str] = _NOBODY
        self._retries = 0
        self._leg: Leg | None = None
        self._pair: Pair | None = None
        self._pair_id = request_id
        """By which the two parts may meet: another for each pair, whatever ids clients give, since KV may be held."""
        self._prefill: PrefillLeg | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: WorkerConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reused = False
        self._first_byte: float | None = None
        self._parted: Parted | None = None
        self._prefilled_at = 0.0
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
        self._opening: Opening | None = None
        self._chunks = 0

    # -- to the worker

    def start(self) -> None:
        """Choose a worker and send the request; nothing, when the client has gone meanwhile."""
        if self._over:
            return
        self._routing.route(self._excluded, self._on_routed)

    def _on_routed(self, routed: Leg | Pair | Response) -> None:
        if isinstance(routed, Response):
            self.answer(routed)
        elif isinstance(routed, Pair):
            self._begin_pair(routed)
        else:
            self._leg = routed
            self._connect(routed, fresh=False)

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
        self._connecting = None
        self._upstream = upstream
        self._reused = upstream.requests > 0
        named = self._pair_id if self._pair else self._request_id
        head_only = request.head.method == b"HEAD"
        upstream.send(self, request_head(request, named, leg), leg.body_of(request), head_only)

    def _on_no_connection(self, reason: str) -> None:
        self._connecting = None
        if not self._over:
            self._give_up_on_worker(f"cannot be reached: {reason}", unreachable=True)

    # -- in two parts

    def _begin_pair(self, pair: Pair) -> None:
        """Both legs at once, or the second when the first has answered."""
        self._pair, self._parted = pair, None
        self._leg = pair.decode
        self._pair_id = b"%s.%016x" % (self._request_id, pair.number)
        self._prefill = PrefillLeg(pair.prefill, self._request, self._pair_id, self, self._clock)
        self._prefill.start(pair.prefill_timeout)
        if pair.decode:
            self._connect(pair.decode, fresh=False)

    def on_prefilled(self, answer: Prefilled) -> None:
        pair, prefill, now = self._pair, self._prefill, self._clock()
        if pair is None or prefill is None:
            return
        self._prefill = None
        self._prefilled_at = now
        self._parted = Parted(pair.prefill.worker.id, now - prefill.began, None, answer)
        self._routing.prefilled(pair.prefill, answer)
        if self._first_byte is None and not self._over:
            self._watch(pair.decode_timeout)
        if pair.decode is None:
            self._hand_over(pair, answer)
        elif self._leg and isinstance(self._leg.reservation, DecodeBooking):
            self._leg.reservation.prefilled(now)

    def _hand_over(self, pair: Pair, answer: Prefilled) -> None:
        leg = self._routing.go_on(pair.prefill, answer, self._excluded)
        if isinstance(leg, str):
            self._retry_or_end(pair.prefill, leg, [frozenset((pair.prefill.worker.id,))])
            return
        self._leg = leg
        self._connect(leg, fresh=False)

    def _watch(self, limit: float | None) -> None:
        """The decode leg must begin its answer within `limit` seconds."""
        self._unwatch()
        if limit is not None:
            self._timer = asyncio.get_running_loop().call_later(limit, self._time_out, limit)

    def _unwatch(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, timeout: float) -> None:
        self._timer = None
        if not self._over and self._first_byte is None:
            self._drop_upstream()
            self._give_up_on_worker(f"sent nothing within {timeout:g} s")

    def on_prefill_failed(self, reason: str, unreachable: bool, answer: Response | None) -> None:
        pair = self._pair
        self._prefill = None
        if self._over or pair is None:
            return
        if self._first_byte is not None:  # a decode worker that answers has all that it needs
            self._routing.failed(pair.prefill, reason, False, unreachable)
            return
        self._drop_decode()
        self._retry_or_end(pair.prefill, reason, [frozenset((pair.prefill.worker.id,))], unreachable, answer)

    def on_prefill_refused(self, refusal: Response) -> None:
        self._prefill = None
        if not self._over and self._first_byte is None:
            self._drop_decode()
            self.answer(refusal)

    def _drop_decode(self) -> None:
        """What the decode leg has begun is of no use."""
        self._drop_upstream()
        if self._leg:
            self._leg.reservation.release(self._clock())
            self._leg = None

    def _drop_upstream(self) -> None:
        self._unwatch()
        if self._connecting:
            self._connecting.cancel()
            self._connecting = None
        upstream, self._upstream = self._upstream, None
        if upstream:
            upstream.abort()

    def _alternatives(self, leg: Leg, unreachable: bool) -> list[frozenset[str]]:
        """Whom to do without, in the order of preference. An error of a decode worker may be the prefill worker's
        fault, so the pair is changed whole where there are others."""
        failed = frozenset((leg.worker.id,))
        pair = self._pair
        if pair is None or unreachable:
            return [failed]
        prefill = frozenset((pair.prefill.worker.id,))
        return [failed | prefill, failed, prefill]

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:
        if head.status in RETRY_STATUSES and self._leg and self._upstream:
            if self._may_retry():
                self._upstream.abort()
                self._upstream = None
                self._give_up_on_worker(f"answered {head.status}")
                return
            if self._pair:
                self._routing.failed(self._leg, f"answered {head.status}", retried=False)
        self._head = head
        self._length = length
        http_1_0 = self._request.head.http_1_0
        if self._pair is None:
            self._relay = relay_for(head, http_1_0)
        else:
            self._relay = self._relay_for_pair(head, http_1_0)
            self._opening = Opening() if head.events else None

    def on_body(self, data: bytes, boundary: int) -> None:
        leg, head, relay, upstream = self._leg, self._head, self._relay, self._upstream
        if leg is None or head is None or relay is None or upstream is None:
            return
        opening = self._opening
        if opening and self._first_byte is None:
            data, boundary = opening.add(data, boundary)
            if self._fails_in_stream(leg, opening.fails(data)) or opening.hold(data, boundary):
                return
        out = relay.body(data, boundary)
        if isinstance(relay, EditedBody):
            return
        if self._first_byte is None:
            out = self._begin_answer(leg, head, relay) + out
        if out:
            self._connection.write(out)
        upstream.pass_events(self._connection.write if relay.clean else None)

    def _fails_in_stream(self, leg: Leg, fails: bool) -> bool:
        """Whether others are asked, since the worker says where its stream should begin that the KV did not come."""
        if not fails:
            return False
        reason = "answered 200, and an error where its stream should begin"
        if self._may_retry():
            self._drop_upstream()
            self._give_up_on_worker(reason)
            return True
        self._routing.failed(leg, reason, retried=False)
        self._opening = None  # it is the client's
        return False

    def on_chunks(self, chunks: int) -> None:
        if self._leg:
            self._leg.reservation.generated(chunks - self._chunks, self._clock())
        self._chunks = chunks

    def on_end(self) -> None:
        leg, head, relay = self._leg, self._head, self._relay
        if leg is None or head is None or relay is None:
            return
        held = relay.body(*self._opening.add(b"", 0)) if self._opening else b""
        out = held + relay.end()
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
        self._drop_upstream()
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
        self._unwatch()
        if self._parted:
            self._parted = self._parted._replace(transfer=now - self._prefilled_at)
        if head.status < _ERRORS:
            leg.reservation.first_token(now)
        else:  # a refusal tells nothing of how long a prompt takes
            leg.reservation.assume_first_token(now)
        keep_alive = self._request.head.keep_alive and not relay.until_close and not self._connection.closing
        edited = isinstance(relay, EditedBody)  # which states its own
        length = b"" if self._length is None or edited else b"content-length: %d\r\n" % self._length
        framing = length + relay.framing if keep_alive else b"%sconnection: close\r\n" % (length + relay.framing)
        return response_head(head, leg, self._request_id, framing)

    def _break_answer(self, reason: str) -> None:
        leg, relay = self._leg, self._relay
        if leg is None or relay is None:
            return
        last = relay.broken(error_event(502, f"Worker {leg.worker.id} broke off its answer: {reason}."))
        self._routing.failed(leg, f"broke off its answer: {reason}", retried=False)
        self._finish(502, "broken")
        if last is None:
            self._connection.abort()
        else:
            self._connection.write(last)
            self._connection.finish(self._request.head.keep_alive)

    def _may_retry(self) -> bool:
        leg = self._leg
        return leg is not None and self._other(self._alternatives(leg, unreachable=False)) is not None

    def _other(self, alternatives: list[frozenset[str]]) -> frozenset[str] | None:
        """The first that leaves somebody to try."""
        if self._retries >= RETRIES:
            return None
        wider = (self._excluded | names for names in alternatives)
        return next((names for names in wider if self._routing.can_retry(names)), None)

    def _give_up_on_worker(self, reason: str, *, unreachable: bool = False) -> None:
        leg, pair, parted = self._leg, self._pair, self._parted
        if leg is None:
            return
        alternatives = self._alternatives(leg, unreachable)
        leg.reservation.release(self._clock())
        if self._prefill:
            self._prefill.cancel()
            self._prefill = None
        if unreachable and pair and pair.decode is None and parted and self._retries < RETRIES:
            # Nobody was told where the KV is, so another may still be.
            other = self._routing.go_on(pair.prefill, parted.answer, self._excluded | {leg.worker.id})
            if isinstance(other, Leg):
                self._retries += 1
                self._routing.failed(leg, reason, retried=True, unreachable=True)
                self._leg = other
                self._connect(other, fresh=False)
                return
        self._retry_or_end(leg, reason, alternatives, unreachable)

    def _retry_or_end(
        self,
        leg: Leg,
        reason: str,
        alternatives: list[frozenset[str]],
        unreachable: bool = False,
        answer: Response | None = None,
    ) -> None:
        """`answer`: what the worker said of it, for the client if nobody else can be asked."""
        self._unwatch()
        other = self._other(alternatives)
        self._routing.failed(leg, reason, other is not None, unreachable)
        if other is None:
            self.answer(answer or error_response(502, f"Worker {leg.worker.id} {reason}."))
            return
        self._retries += 1
        self._excluded = other
        self._pair = self._parted = None
        self.start()

    def _relay_for_pair(self, head: Head, http_1_0: bool) -> Relay:
        """The client is told what was cached where its prompt was computed."""
        if head.status >= _ERRORS or head.framing == "close":
            return relay_for(head, http_1_0)
        if head.events and not http_1_0:
            return EditedEvents(CACHED, self._with_cached)
        return EditedBody(head, self._with_cached)

    def _with_cached(self, answer: bytes) -> bytes:
        cached = self._parted.answer.cached_tokens if self._parted else None
        return answer if cached is None else with_cached(answer, cached)

    def answer(self, response: Response) -> None:
        """End the request with an answer of the router's own."""
        if self._over:
            return
        self._finish(response.status, "failed")
        named = (*response.headers, (REQUEST_ID, self._request_id))
        self._connection.respond(response._replace(headers=named))

    def _finish(self, status: int, end: End) -> None:
        self._over = True
        self._unwatch()
        upstream, self._upstream = self._upstream, None
        now = self._clock()
        prefill, self._prefill = self._prefill, None
        if prefill:
            prefill.cancel()
        if self._leg:
            self._leg.reservation.release(now)
        complete = upstream if end == "complete" else None
        prompt, cached = read_usage(complete.recent, complete.latest) if complete else (None, None)
        parted = self._parted
        if parted and cached is not None and parted.answer.cached_tokens is not None:
            cached = parted.answer.cached_tokens
        leg = self._leg or (self._pair.prefill if self._pair else None)
        first_byte, duration = self._first_byte, now - self._began
        self._routing.finished(Outcome(leg, status, end, first_byte, duration, prompt, cached, parted))


_NOBODY: frozenset[str] = frozenset()
