"""The life of one request: sent to a worker, to another one if that fails before the first byte, and answered.

Callbacks instead of a task, so that relaying a piece costs one call. The exchange owns the reservation and releases it
exactly once, whatever happens: the answer ends, the worker fails, or the client leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from engines.disaggregation.answer import Prefilled
from router.http.edited import EditedBody
from router.http.front import Connection
from router.http.messages import Request, Response, connection_line, unencoded, with_request_id
from router.http.relay import LAST_CHUNK, Events, Relay, chunk, relay_for
from router.http.upstream import Head
from router.migration.migrating import Migration
from router.openai.errors import error_event, error_response
from router.proxy.failures import RETRY_STATUSES, Failure, answered
from router.proxy.legs import Leg, Pair, response_head
from router.proxy.outcome import End, Outcome, Silence
from router.proxy.sending import Sending
from router.proxy.usage import read_usage
from router.split.opening import Opening, is_aborted
from router.split.two_parts import TwoParts
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

HARMED = 1
"""Workers that may fail badly on one request before no other is tried: a request that crashes engines must not crash
all."""


class Routing(Protocol):
    """What an exchange asks of the router around it."""

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Pair | Response], None]) -> None:
        """Choose and book one or two workers outside `exclude`, now or later; or answer why there is none."""

    def go_on(self, prefill: Leg, answer: Prefilled, exclude: frozenset[str]) -> Leg | Failure:
        """Choose and book the worker that decodes what `prefill` has computed, or say why there is none."""

    def prefilled(self, prefill: Leg, answer: Prefilled) -> None:
        """A prefill worker has answered."""

    def withdraw(self) -> None:
        """Cancel a pending `route`."""

    def can_retry(self, exclude: frozenset[str]) -> bool:
        """Whether `route` would find a worker, and the retry budget allows another try."""

    def answered(self, leg: Leg) -> None:
        """A worker that has failed recently has begun to answer."""

    def resume(self, migration: Migration, exclude: frozenset[str]) -> frozenset[str] | None:
        """Prepare for another worker to continue the answer. Returns what to `route` with; None if there is no such
        worker."""

    def failed(self, leg: Leg, failure: Failure, retried: bool) -> None:
        """The leg's worker has failed this request."""

    def finished(self, outcome: Outcome) -> None: ...


class Exchange:
    """Implements `front.Exchange` towards the client, `upstream.Receiver` towards the worker that answers, and
    `prefill_leg.Owner` towards one that only prefills."""

    __slots__ = (
        "_chunks",
        "_clock",
        "_connection",
        "_excluded",
        "_first_byte",
        "_harmed",
        "_head",
        "_length",
        "_migration",
        "_on_first_bytes",
        "_opening",
        "_over",
        "_parts",
        "_paused",
        "_relay",
        "_request",
        "_request_id",
        "_resuming",
        "_routing",
        "_seen",
        "_seen_at",
        "_sending",
        "_sent_at",
        "_under_way",
        "began",
        "streamed",
    )

    def __init__(
        self,
        request: Request,
        request_id: bytes,
        connection: Connection,
        routing: Routing,
        clock: Callable[[], float],
        under_way: set[Exchange],
        streamed: bool = False,
        migration: Migration | None = None,
        on_first_bytes: Callable[[Worker, bytes], None] | None = None,
    ) -> None:
        """`under_way`: contains the exchange until it is over. `streamed`: the answer comes piece by piece.
        `migration`: another worker may continue the answer. `on_first_bytes`: called with the worker that answers
        and the first bytes of its answer, if its status is 200."""
        self._request = unencoded(request) if migration else request
        self._request_id = request_id
        self._connection = connection
        self._routing = routing
        self._migration = migration
        self._on_first_bytes = on_first_bytes
        self._resuming = False
        """The answer has begun, and another worker is about to continue it."""
        self._clock = clock
        self.began = clock()
        self.streamed = streamed
        self._excluded: frozenset[str] = _NOBODY
        self._harmed = 0
        self._sending: Sending | None = None
        """The attempt at the worker that answers."""
        self._parts: TwoParts | None = None
        self._first_byte: float | None = None
        self._seen: bytes | None = None
        self._seen_at = self._sent_at = 0.0
        self._over = self._paused = False
        self._under_way = under_way
        under_way.add(self)
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

    @property
    def _leg(self) -> Leg | None:
        return self._sending.leg if self._sending else None

    # -- to the worker

    def start(self) -> None:
        """Choose a worker and send the request. Does nothing if the client has gone meanwhile."""
        if self._over:
            return
        self._routing.route(self._excluded, self._on_routed)

    def _on_routed(self, routed: Leg | Pair | Response) -> None:
        if isinstance(routed, Response):
            self._end_with(routed)
        elif isinstance(routed, Pair):
            self._send_both(routed)
        else:
            self._send(routed)

    def _send(self, leg: Leg) -> None:
        relay = self._relay if self._resuming else None
        self._reset_answer()
        self._relay = relay
        self._seen, self._seen_at = None, self._clock()
        self._sent_at = self._seen_at
        parts = self._parts
        name = parts.name if parts else self._request_id
        receiver = parts.receiver(self, self._settle) if parts else self
        self._sending = sending = Sending(leg, receiver, self._fail, self._request.head.method == b"HEAD")
        sending.start(self._request, name)

    def _settle(self) -> None:
        if self._sending:
            self._sending.settle()

    def silence(self, now: float) -> Silence | None:
        """How long the worker has been silent, seen from tick to tick; None if it owes nothing: nothing was sent yet,
        or the client does not read."""
        sending, parts = self._sending, self._parts
        if self._over:
            return None
        if parts and parts.parted is None and self._first_byte is None:  # the decode worker waits for the prompt
            self._seen_at = now
            return parts.silence()
        upstream = sending.connection if sending else None
        if sending is None or upstream is None or upstream.paused:
            self._seen_at = now
            return None
        moved = upstream.latest is not self._seen and upstream.latest != b""
        if moved:
            self._seen, self._seen_at = upstream.latest, now
        return Silence(sending.leg.worker, self._seen_at, "rest" if self._answering else "beginning", moved)

    def time_out(self, reason: str) -> None:
        """The worker named by `silence` has been silent for too long. `reason`: as in `Failure`."""
        failure = Failure("stalled", reason)
        if not (self._parts and self._first_byte is None and self._parts.fail(failure)):
            self._fail(failure)

    def expire(self, limit: float) -> None:
        """The request has reached `--request-timeout`."""
        self.stop(504, f"The request took longer than the {limit:g} s that it may in all (--request-timeout).")

    def stop(self, status: int, reason: str) -> None:
        """End the request, whatever its state, and tell the client."""
        if self._over:
            return
        self._routing.withdraw()
        if self._first_byte is not None:
            self._cut(status, reason)
            return
        self._drop_parts()
        self._drop()
        self.answer(error_response(status, reason))

    # -- in two parts

    def _send_both(self, pair: Pair) -> None:
        """Send both legs at once, or the second when the first has answered."""
        self._sending = None
        self._request = unencoded(self._request)
        self._parts = TwoParts(pair, self._request, self._request_id, self, self._clock)
        self._parts.start()
        if pair.decode:
            self._send(pair.decode)

    def on_prefilled(self, answer: Prefilled) -> None:
        parts = self._parts
        if parts is None:
            return
        waits = self._first_byte is None and not self._over
        parts.prefilled(answer, self._leg, self._on_late if waits else None)
        self._routing.prefilled(parts.pair.prefill, answer)
        if parts.pair.decode is None:
            self._hand_over(parts.pair, answer)
        parts.release_usage()

    def _on_late(self, limit: float) -> None:
        self.time_out(f"sent nothing within {limit:g} s")

    def _hand_over(self, pair: Pair, answer: Prefilled) -> None:
        leg = self._routing.go_on(pair.prefill, answer, self._excluded)
        if isinstance(leg, Failure):
            self._drop_parts()
            self._retry_or_end(pair.prefill, leg)
        else:
            self._send(leg)

    def on_prefill_failed(self, failure: Failure, answer: Response | None) -> None:
        parts = self._parts
        if self._over or parts is None:
            return
        parts.prefill_over()
        if self._first_byte is not None or parts.decoded:  # a decode worker that answers has the KV
            self._routing.failed(parts.pair.prefill, failure, retried=False)
            parts.release_usage()
            return
        self._drop()
        parts.cancel()
        self._retry_or_end(parts.pair.prefill, failure, answer=answer)

    def on_prefill_refused(self, refusal: Response) -> None:
        parts = self._parts
        if self._over or parts is None:
            return
        parts.prefill_over()
        self._has_answered(parts.pair.prefill)
        if self._first_byte is not None or parts.decoded:  # as above
            parts.release_usage()
            return
        self._drop()
        self.answer(refusal)

    def _drop(self) -> None:
        """Give up the attempt at the answering worker."""
        sending, self._sending = self._sending, None
        if sending:
            sending.drop()
            sending.leg.reservation.release(self._clock())

    def _drop_parts(self) -> None:
        if self._parts:
            self._parts.cancel()

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:
        leg = self._leg
        if self._resuming and leg:
            self._resume_with(leg, head)
            return
        if head.status in RETRY_STATUSES and leg and self._retries(leg, answered(head.status)):
            return
        self._head = head
        self._length = length
        http_1_0 = self._request.head.http_1_0
        if self._parts is None:
            recorded = self._migration.relay(head) if self._migration else None
            self._relay = recorded or relay_for(head, http_1_0)
        else:
            self._relay = self._parts.relay(head, http_1_0)
            self._opening = Opening() if head.events and head.framing == "chunked" else None

    def on_body(self, data: bytes, boundary: int) -> None:
        sending, head, relay = self._sending, self._head, self._relay
        if sending is None or head is None or relay is None or sending.connection is None:
            return
        opening = self._opening
        if opening and self._first_byte is None:
            data, boundary = opening.add(data, boundary)
            reason = "answered 200, and an error where its stream should begin"
            if self._retries_if(opening.fails(data), sending.leg, reason) or opening.hold(data, boundary):
                return
        out = relay.body(data, boundary)
        if isinstance(relay, EditedBody) or (self._migration and self._breaks_down(self._migration, out)):
            return
        if self._first_byte is None:
            self._begin_answer(sending.leg, head, relay, out)
        elif out:
            self._connection.write(out)
        sending.connection.pass_events(self._connection.write if relay.clean else None)

    def _retries(self, leg: Leg, failure: Failure) -> bool:
        """Whether another worker is tried, since this one has failed and the client has nothing of its answer yet."""
        if self._other(failure, self._alternatives(leg, failure)):
            self._give_up_on_worker(failure)
            return True
        self._routing.failed(leg, failure, retried=False)
        return False

    def _retries_if(self, fails: bool, leg: Leg, reason: str) -> bool:
        if not fails:
            return False
        if self._retries(leg, Failure("error", reason)):
            return True
        self._opening = None  # the answer goes to the client
        return False

    def on_chunks(self, chunks: int) -> None:
        if self._leg:
            try:
                self._leg.reservation.generated(chunks - self._chunks, self._clock())
            except Exception:  # as in `_learn`
                logger.exception("Tokens could not be learned from")
        self._chunks = chunks

    def on_end(self) -> None:
        leg, head, relay = self._leg, self._head, self._relay
        if leg is None or head is None or relay is None:
            return
        if self._migration and not self._migration.whole:
            self._fail(Failure("broken", "ended its answer before it was whole"))
            return
        held = relay.body(*self._opening.add(b"", 0)) if self._opening else b""
        out = held + relay.end()
        if isinstance(relay, EditedBody) and self._retries_if(is_aborted(out), leg, "aborted its answer"):
            return
        if self._first_byte is None:
            self._begin_answer(leg, head, relay, out)
        elif out:
            self._connection.write(out)
        self._finish(head.status, "complete")
        self._connection.finish(self._request.head.keep_alive and not relay.until_close)

    def on_broken(self, reason: str) -> None:
        sending = self._sending
        if self._answering and self._is_done():
            self._end_stream(b"")
        elif self._answering:
            self._break_answer(Failure("broken", f"broke off its answer: {reason}"))
        elif sending and (self._head is not None or not sending.again(self._clock() - self._sent_at)):
            self._fail(Failure("broken", f"broke off before its first byte: {reason}"))

    def _is_done(self) -> bool:
        upstream, relay = self._sending and self._sending.connection, self._relay
        return bool(upstream and isinstance(relay, Events) and relay.is_done(upstream.latest))

    # -- front.Exchange

    def cancel(self) -> None:
        if self._over:
            return
        self._routing.withdraw()
        self._finish(499, "cancelled")

    def pause(self) -> None:
        self._paused = True
        if self._sending and self._sending.connection:
            self._sending.connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._sending and self._sending.connection:
            self._sending.connection.resume()

    # -- inside

    def _begin_answer(self, leg: Leg, head: Head, relay: Relay, body: bytes) -> None:
        """The first byte is here: from now on no other worker can be tried, and the prefill is done. The latency model
        learns from it after the client has it."""
        now = self._clock()
        self._first_byte = now - self.began
        self._connection.write(self._answer_head(leg, head, relay) + body)
        if self._parts:
            self._parts.answers(head.is_error)
        if self._on_first_bytes and head.status == 200:
            self._tell_of_answer(self._on_first_bytes, leg.worker, body)
        self._learn(leg, head, now)

    def _tell_of_answer(self, tell: Callable[[Worker, bytes], None], worker: Worker, body: bytes) -> None:
        try:
            tell(worker, body)
        except Exception:  # as in `_learn`
            logger.exception("The worker of an answer could not be remembered")

    def _learn(self, leg: Leg, head: Head, now: float) -> None:
        """What the first byte teaches. A fault there costs neither the answer nor the release at its end."""
        try:
            if head.status not in RETRY_STATUSES:
                self._has_answered(leg)
            if head.is_error:  # an error says nothing about the prefill's time
                leg.reservation.assume_first_token(now)
            else:
                leg.reservation.first_token(now)
        except Exception:
            logger.exception("A first byte could not be learned from")

    def _has_answered(self, leg: Leg) -> None:
        if not leg.worker.breaker.quiet:
            self._routing.answered(leg)

    def _answer_head(self, leg: Leg, head: Head, relay: Relay) -> bytes:
        keep_alive = self._request.head.keep_alive and not relay.until_close and not self._connection.closing
        edited = isinstance(relay, EditedBody)  # it states a length of its own
        length = b"" if self._length is None or edited else b"content-length: %d\r\n" % self._length
        framing = length + relay.framing + connection_line(keep_alive, self._request.head.http_1_0)
        return response_head(head, leg, self._request_id, framing)

    @property
    def _answering(self) -> bool:
        """Whether the first byte of this worker's answer is here."""
        return self._first_byte is not None and not self._resuming

    def _fail(self, failure: Failure) -> None:
        if self._over or self._leg is None:
            return
        if self._first_byte is None:
            self._give_up_on_worker(failure)
        else:
            self._break_answer(failure)

    def _break_answer(self, failure: Failure) -> None:
        leg = self._leg
        if leg is None or (self._migration and self._migrate(leg, failure, self._migration)):
            return
        self._routing.failed(leg, failure, retried=False)
        self._cut(failure.status, f"Worker {leg.worker.id} {failure.reason}.")

    def _cut(self, status: int, message: str) -> None:
        """End an answer that has begun so that the client can see that it is incomplete."""
        relay = self._relay
        last = relay.broken(error_event(status, message)) if relay else None
        self._finish(status, "broken")
        if relay is None or last is None:
            self._connection.abort()
        else:
            self._connection.write(last)
            self._connection.finish(self._request.head.keep_alive and not relay.until_close)

    def _alternatives(self, leg: Leg, failure: Failure) -> list[frozenset[str]]:
        """Sets of workers to exclude next, the preferred one first."""
        if self._parts is None or failure.untold or failure.kind == "busy":  # the KV is not to blame for these
            return _without(leg)
        return self._parts.others(leg)

    def _other(self, failure: Failure, alternatives: list[frozenset[str]]) -> frozenset[str] | None:
        """The first set that leaves a worker to try; None if there is none."""
        if not failure.harmless and self._harmed >= HARMED:
            return None
        wider = (self._excluded | names for names in alternatives)
        return next((names for names in wider if self._routing.can_retry(names)), None)

    def _give_up_on_worker(self, failure: Failure) -> None:
        """The worker has failed before its first byte."""
        leg, parts = self._leg, self._parts
        if leg is None or self._over:
            return
        alternatives = self._alternatives(leg, failure)
        self._drop()
        self._drop_parts()
        if failure.untold and parts and parts.may_move and parts.parted:
            other = self._routing.go_on(parts.pair.prefill, parts.parted.answer, self._excluded | {leg.worker.id})
            if isinstance(other, Leg):
                self._excluded |= {leg.worker.id}
                self._routing.failed(leg, failure, retried=True)
                parts.watch()
                self._send(other)
                return
        self._retry_or_end(leg, failure, alternatives)

    def _retry_or_end(
        self,
        leg: Leg,
        failure: Failure,
        alternatives: list[frozenset[str]] | None = None,
        answer: Response | None = None,
    ) -> None:
        """`alternatives`: as `_alternatives` returns them; None: only the leg's worker is excluded. `answer`: the
        worker's own error, for the client if no other worker can be tried."""
        other = self._other(failure, alternatives or _without(leg))
        self._routing.failed(leg, failure, other is not None)
        if other is None:
            self.answer(answer or error_response(failure.status, f"Worker {leg.worker.id} {failure.reason}."), leg)
            return
        self._harmed += not failure.harmless
        self._excluded = other
        self._parts = None
        self.start()

    # -- from one worker to another in the middle of a stream

    def _breaks_down(self, migration: Migration, out: bytes) -> bool:
        """Whether nothing more is to be done with this piece: it reports a failure, or there is nothing to send yet."""
        if out and self._resuming and self._leg and self._head:
            self._resumed(self._leg, self._head, migration)
        if migration.failure is None:
            return not out
        if out and self._first_byte is not None:
            self._connection.write(out)
        self._fail(Failure("error", f"broke off its answer: it {migration.failure}"))
        return True

    def _migrate(self, leg: Leg, failure: Failure, migration: Migration) -> bool:
        """Whether the client will get the rest of the answer after all."""
        end = migration.ending()
        if end is not None:
            self._routing.failed(leg, failure, retried=False)
            if self._sending:
                self._sending.drop()
            self._end_stream(end)
            return True
        if not migration.cut(unbegun=self._resuming and failure.harmless):
            return False
        others = self._routing.resume(migration, self._excluded | {leg.worker.id})
        if others is None:
            migration.count("failed")
            return False
        self._routing.failed(leg, failure, retried=True)
        self._drop()
        self._excluded = others
        self._resuming = True
        self.start()
        return True

    def _resume_with(self, leg: Leg, head: Head) -> None:
        relay = self._migration.relay(head) if self._migration else None
        if relay:
            self._head, self._relay = head, relay
            if self._paused:  # the client is still behind
                self.pause()
        elif head.status in RETRY_STATUSES:
            self._break_answer(answered(head.status))
        else:  # the request is at fault, not the worker
            self._end_with(error_response(502, f"Worker {leg.worker.id} answered {head.status} when it was to go on."))

    def _resumed(self, leg: Leg, head: Head, migration: Migration) -> None:
        self._resuming = False
        migration.count("continued")
        self._learn(leg, head, self._clock())

    def _end_stream(self, events: bytes) -> None:
        """End a stream of which only `events`, and HTTP's last chunk, are missing."""
        self._finish(200, "complete")
        self._connection.write((chunk(events) if events else b"") + LAST_CHUNK)
        self._connection.finish(self._request.head.keep_alive)

    def _end_with(self, response: Response) -> None:
        if self._first_byte is None:
            self.answer(response)
            return
        if self._migration:
            self._migration.count("failed")
        self._cut(response.status, "The worker broke off its answer, and no other could go on.")

    def answer(self, response: Response, leg: Leg | None = None) -> None:
        """End the request with an answer of the router's own. `leg`: the attempt whose failure it reports."""
        if self._over:
            return
        self._finish(response.status, "failed", leg)
        self._connection.respond(with_request_id(response, self._request_id))

    def _finish(self, status: int, end: End, leg: Leg | None = None) -> None:
        self._over = True
        self._under_way.discard(self)
        sending, parts, now = self._sending, self._parts, self._clock()
        prompt, cached = None, None
        if sending:
            leg = sending.leg
            leg.reservation.release(now)
            upstream = sending.connection
            if end != "complete":
                sending.drop()
            elif upstream:  # it is back in its pool, but keeps its last pieces until its next request
                prompt, cached = read_usage(upstream.recent, upstream.latest)
        parted = None
        if parts:
            parts.cancel()
            parted = parts.parted
            leg = leg or parts.pair.prefill
        if parted and cached is not None and parted.answer.cached_tokens is not None:
            cached = parted.answer.cached_tokens
        self._sending = self._parts = self._relay = None  # they refer to this object
        self._routing.finished(Outcome(leg, status, end, self._first_byte, now - self.began, prompt, cached, parted))


def _without(leg: Leg) -> list[frozenset[str]]:
    return [frozenset((leg.worker.id,))]


_NOBODY: frozenset[str] = frozenset()
