"""The life of one request: sent to a worker, to another one if that fails, and answered.

Callbacks instead of a task, so that relaying a piece costs one call. The exchange has one `Attempt` after the other; it
decides what follows when one fails, and what the client is told at the end. It owns the reservation and releases it
exactly once, whatever happens: the answer ends, the worker fails, or the client leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engines.disaggregation.answer import Prefilled
from router.http.front import Connection
from router.http.messages import UNBUFFERED, Request, Response, unencoded, with_request_id
from router.http.relay import COMMENT, LAST_CHUNK, Events, Relay, chunk
from router.http.upstream import Head
from router.migration.migrating import Migration
from router.openai.errors import as_event, error_event, error_response, typed_for
from router.proxy.attempt import Attempt
from router.proxy.failures import MOST_HARMED, Failure
from router.proxy.legs import Leg, Pair
from router.proxy.outcome import End, Outcome, Silence
from router.proxy.routing import Routing
from router.split.split_request import SplitRequest
from router.workers.worker import Worker

logger = logging.getLogger(__name__)


class Exchange:
    """Implements `front.Exchange` towards the client, and `prefill_leg.Owner` towards a worker that only prefills. Its
    `Attempt` faces the worker that answers."""

    __slots__ = (
        "_attempt",
        "_commented_at",
        "_excluded",
        "_harmed",
        "_interrupted",
        "_on_first_bytes",
        "_over",
        "_routing",
        "_under_way",
        "began",
        "clock",
        "commented",
        "connection",
        "first_byte",
        "migration",
        "opened",
        "paused",
        "request",
        "request_id",
        "split",
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
        commented: bool = False,
    ) -> None:
        """`under_way`: contains the exchange until it is over. `streamed`: the answer comes piece by piece.
        `migration`: another worker may continue the answer. `on_first_bytes`: called with the worker that answers
        and the first bytes of its answer, if its status is 200. `commented`: the client of a stream gets comments while
        nothing comes."""
        self.commented = commented and streamed and not request.head.http_1_0  # whose answers have no chunks
        self.request = unencoded(request) if migration or self.commented else request
        self.request_id = request_id
        self.connection = connection
        self._routing = routing
        self.migration = migration
        self._on_first_bytes = on_first_bytes
        self.clock = clock
        self.began = clock()
        self._commented_at = self.began
        """When the client was last sent a comment; before that, when it sent its request."""
        self.opened = False
        """Whether the client has the head of a stream, and comments, of which no worker is the author."""
        self.streamed = streamed
        self._excluded: frozenset[str] = _NOBODY
        """Workers that are not tried any more."""
        self._harmed = 0
        """Workers that the request may have broken; see `MOST_HARMED`."""
        self._attempt: Attempt | None = None
        """The present one, at the worker that answers or is to answer."""
        self._interrupted: Relay | None = None
        """Relays a stream that has begun, and that another worker is about to continue."""
        self.split: SplitRequest | None = None
        """The request's two parts; None while one worker serves it alone."""
        self.first_byte: float | None = None
        """Seconds until the client had the first byte of an answer; None before."""
        self.paused = False
        """The client reads more slowly than its answer comes."""
        self._over = False
        self._under_way = under_way
        under_way.add(self)

    def __repr__(self) -> str:
        where = self._leg.worker.id if self._leg else "nowhere"
        return f"<Exchange at {where}, {'answering' if self.first_byte else 'waiting'}{', over' if self._over else ''}>"

    @property
    def _leg(self) -> Leg | None:
        return self._attempt.leg if self._attempt else None

    # -- to the worker

    def start(self) -> None:
        """Choose a worker and send the request. Does nothing if the client has gone meanwhile."""
        if self._over:
            return
        self._routing.route(self._excluded, self._on_routed)

    def _on_routed(self, routed: Leg | Pair | Response) -> None:
        if isinstance(routed, Response):
            self.end_with(routed)
        elif isinstance(routed, Pair):
            self._send_both(routed)
        else:
            self._send(routed)

    def _send(self, leg: Leg) -> None:
        self._attempt = attempt = Attempt(self, leg, self._interrupted)
        attempt.start()

    def silence(self, now: float) -> Silence | None:
        """How long the worker has been silent, seen from tick to tick; None if it owes nothing: nothing was sent yet,
        or the client does not read."""
        attempt, split = self._attempt, self.split
        if split and split.parted is None and self.first_byte is None:  # the decode worker waits for the prompt
            if attempt:
                attempt.excuse(now)
            return split.silence()
        return attempt.silence(now) if attempt else None

    def time_out(self, reason: str) -> None:
        """The worker named by `silence` has been silent for too long. `reason`: as in `Failure`."""
        failure = Failure("stalled", reason)
        if not (self.split and self.first_byte is None and self.split.fail(failure)):
            self.fail(failure)

    def expire(self, limit: float) -> None:
        """The request has reached `--request-timeout`."""
        self.stop(504, f"The request took longer than the {limit:g} s that it may in all (--request-timeout).")

    def stop(self, status: int, reason: str) -> None:
        """End the request, whatever its state, and tell the client."""
        if self._over:
            return
        self._routing.withdraw()
        if self.first_byte is not None:
            attempt = self._attempt
            if self.migration and not (attempt and attempt.begun):  # another worker was about to go on
                self.migration.count("failed")
            self._cut(status, reason)
            return
        self.answer(error_response(status, reason))

    # -- while nothing comes

    @property
    def last_sent(self) -> float:
        """When the client was last sent anything of a stream, seen from tick to tick."""
        attempt = self._attempt
        return max(attempt.moved_at if attempt and attempt.begun else self.began, self._commented_at)

    def comment(self, now: float) -> None:
        """Send a comment, if the stream is between two events, and begin it if it has not begun."""
        attempt = self._attempt
        relay = attempt.relay if attempt else self._interrupted
        unanswered = self.first_byte is None
        if self.paused or not (relay.between_events if isinstance(relay, Events) else relay is None and unanswered):
            return
        if unanswered and not self.opened:
            self.opened = True
            response = self._routing.labelled(Response(200, content_type=_EVENTS, headers=_LIVE))
            self.connection.begin(with_request_id(response, self.request_id))
        self.connection.write(COMMENT)
        self._commented_at = now

    # -- in two parts

    def _send_both(self, pair: Pair) -> None:
        """Send both legs at once, or the second when the first has answered."""
        self._attempt = None
        self.request = unencoded(self.request)
        self.split = SplitRequest(pair, self.request, self.request_id, self, self.clock)
        self.split.start()
        if pair.decode:
            self._send(pair.decode)

    def on_prefilled(self, answer: Prefilled) -> None:
        split = self.split
        if split is None:
            return
        waits = self.first_byte is None and not self._over
        split.prefilled(answer, self._leg, self._on_late if waits else None)
        self._routing.prefilled(split.pair.prefill, answer)
        if split.pair.decode is None:
            self._hand_over(split.pair, answer)
        split.release_usage()

    def _on_late(self, limit: float) -> None:
        self.time_out(f"sent nothing within {limit:g} s")

    def _hand_over(self, pair: Pair, answer: Prefilled) -> None:
        leg = self._routing.go_on(pair.prefill, answer, self._excluded)
        if isinstance(leg, Failure):
            self._drop_split()
            self._retry_or_end(pair.prefill, leg)
        else:
            self._send(leg)

    def on_prefill_failed(self, failure: Failure, answer: Response | None) -> None:
        split = self.split
        if self._over or split is None:
            return
        split.prefill_over()
        if self.first_byte is not None or split.decoded:  # a decode worker that answers has the KV
            self._routing.failed(split.pair.prefill, failure, retried=False)
            split.release_usage()
            return
        self._drop()
        split.cancel()
        self._retry_or_end(split.pair.prefill, failure, answer=answer)

    def on_prefill_refused(self, refusal: Response) -> None:
        split = self.split
        if self._over or split is None:
            return
        split.prefill_over()
        self.on_answered(split.pair.prefill)
        if self.first_byte is not None or split.decoded:  # as above
            split.release_usage()
            return
        self._drop()
        self._pass_on(refusal)

    def start_over(self, worker: Worker) -> bool:
        """Make another pair, since `worker` had closed the connection over which it was sent its part. Returns False if
        that is too late, or if enough was tried.

        The worker may have received its part all the same. Then the KV under the name of this pair may have been
        fetched already, or be kept for nobody, so the part cannot just be sent again. The worker may also have died
        just now, so another one is chosen if there is any.
        """
        late = self._over or self.first_byte is not None or (self.split and self.split.decoded)
        if late or self._harmed >= MOST_HARMED:
            return False
        self._harmed += 1  # it may have been the request that broke it
        others = self._excluded | {worker.id}
        if self._routing.can_retry(others):
            self._excluded = others
        self._drop()
        self._drop_split()
        self.split = None
        self.start()
        return True

    def _drop(self) -> None:
        """Give up the attempt at the answering worker."""
        attempt, self._attempt = self._attempt, None
        if attempt:
            attempt.drop()
            attempt.leg.reservation.release(self.clock())

    def _drop_split(self) -> None:
        if self.split:
            self.split.cancel()

    # -- front.Exchange

    def cancel(self) -> None:
        if self._over:
            return
        self._routing.withdraw()
        self._finish(499, "cancelled")

    def pause(self) -> None:
        self.paused = True
        if self._attempt:
            self._attempt.pause()

    def resume(self) -> None:
        self.paused = False
        if self._attempt:
            self._attempt.resume()

    # -- from the attempt

    def on_begun(self, worker: Worker, head: Head, body: bytes) -> None:
        """The client has been given the head and the first bytes of `worker`'s answer."""
        if self.split:
            self.split.answers(head.is_error)
        if self._on_first_bytes and head.status == 200:
            try:
                self._on_first_bytes(worker, body)
            except Exception:  # whatever it is, the answer goes on
                logger.exception("The worker of an answer could not be remembered")

    def on_answered(self, leg: Leg) -> None:
        if not leg.worker.breaker.quiet:
            self._routing.answered(leg)

    def fail(self, failure: Failure) -> None:
        """The worker has failed, before its first byte or after it."""
        if self._over or self._leg is None:
            return
        if self.first_byte is None:
            self._give_up_on_worker(failure)
        else:
            self._break_answer(failure)

    # -- from one worker to another before the first byte

    def retries(self, failure: Failure) -> bool:
        """Whether another worker is tried, since this one has failed and the client has nothing of its answer yet."""
        leg = self._leg
        if leg is None:
            return False
        if self._other(leg, failure, self._alternatives(leg, failure)):
            self._give_up_on_worker(failure)
            return True
        self._routing.failed(leg, failure, retried=False)
        return False

    def _alternatives(self, leg: Leg, failure: Failure) -> list[frozenset[str]]:
        """Sets of workers to exclude next, the preferred one first."""
        if self.split is None or failure.untold or failure.kind == "busy":  # the KV is not to blame for these
            return _without(leg)
        return self.split.others(leg)

    def _other(self, leg: Leg, failure: Failure, alternatives: list[frozenset[str]]) -> frozenset[str] | None:
        """The first set that leaves a worker to try; None if there is none."""
        if _may_have_harmed(leg, failure) and self._harmed >= MOST_HARMED:
            return None
        wider = (self._excluded | names for names in alternatives)
        return next((names for names in wider if self._routing.can_retry(names)), None)

    def _give_up_on_worker(self, failure: Failure) -> None:
        """The worker has failed before its first byte."""
        leg, split = self._leg, self.split
        if leg is None or self._over:
            return
        alternatives = self._alternatives(leg, failure)
        self._drop()
        self._drop_split()
        if not (failure.untold and split and self._decode_elsewhere(split, leg, failure)):
            self._retry_or_end(leg, failure, alternatives)

    def _decode_elsewhere(self, split: SplitRequest, leg: Leg, failure: Failure) -> bool:
        """The decode worker of `leg` is unreachable: whether another one decodes the computed prompt in its place."""
        if not split.may_move or split.parted is None:
            return False
        others = self._excluded | {leg.worker.id}
        other = self._routing.go_on(split.pair.prefill, split.parted.answer, others)
        if isinstance(other, Failure):
            return False
        self._excluded = others
        self._routing.failed(leg, failure, retried=True)
        split.watch()
        self._send(other)
        return True

    def _retry_or_end(
        self,
        leg: Leg,
        failure: Failure,
        alternatives: list[frozenset[str]] | None = None,
        answer: Response | None = None,
    ) -> None:
        """`alternatives`: as `_alternatives` returns them; None: only the leg's worker is excluded. `answer`: the
        worker's own error, for the client if no other worker can be tried."""
        other = self._other(leg, failure, alternatives or _without(leg))
        if other is None and self._waits(leg, failure):
            other = _NOBODY
        self._routing.failed(leg, failure, other is not None)
        if other is None and answer:
            self._pass_on(answer, leg)
            return
        if other is None:
            self.answer(error_response(failure.status, f"Worker {leg.worker.id} {failure.reason}."), leg)
            return
        self._harmed += _may_have_harmed(leg, failure)
        self._excluded = other
        self.split = None
        self.start()

    def _waits(self, leg: Leg, failure: Failure) -> bool:
        """Whether the request is held until a worker is up: none is, or none but the leg's, which is unreachable."""
        if failure.untold:
            return self._routing.waits_for(frozenset((leg.worker.id,)))
        return failure.kind == "unasked" and self._routing.waits_for(_NOBODY)

    # -- from one worker to another in the middle of a stream

    def _break_answer(self, failure: Failure) -> None:
        attempt = self._attempt
        if attempt is None or (self.migration and self._migrate(attempt, failure, self.migration)):
            return
        self._routing.failed(attempt.leg, failure, retried=False)
        self._cut(failure.status, f"Worker {attempt.leg.worker.id} {failure.reason}.")

    def _migrate(self, attempt: Attempt, failure: Failure, migration: Migration) -> bool:
        """Whether the client will get the rest of the answer after all."""
        leg, end = attempt.leg, migration.ending()
        if end is not None:
            self._routing.failed(leg, failure, retried=False)
            attempt.drop()
            self.end_stream(end)
            return True
        if not migration.cut(unbegun=failure.harmless and not attempt.begun):
            return False
        # Workers that failed before this one began its part may be well again by now.
        before = _NOBODY if attempt.begun else self._excluded
        others = self._routing.resume(migration, before | {leg.worker.id})
        if others is None:
            migration.count("failed")
            return False
        self._routing.failed(leg, failure, retried=True)
        self._interrupted = attempt.relay
        self._drop()
        self._excluded = others
        self.start()
        return True

    # -- the end

    def end(self, status: int, relay: Relay) -> None:
        """The answer is complete."""
        self._finish(status, "complete")
        self.connection.finish(self.request.head.keep_alive and not relay.until_close)

    def end_stream(self, events: bytes = b"") -> None:
        """End a stream of which only `events`, and HTTP's last chunk, are missing."""
        self._finish(200, "complete")
        self.connection.write((chunk(events) if events else b"") + LAST_CHUNK)
        self.connection.finish(self.request.head.keep_alive)

    def _cut(self, status: int, message: str) -> None:
        """End an answer that has begun so that the client can see that it is incomplete."""
        attempt = self._attempt
        relay = attempt.relay if attempt else self._interrupted
        event = error_event(status, message, self.request.head.path, attempt.latest if attempt else b"")
        last = relay.broken(event) if relay else None
        self._finish(status, "broken")
        if relay is None or last is None:
            self.connection.abort()
        else:
            self.connection.write(last)
            self.connection.finish(self.request.head.keep_alive and not relay.until_close)

    def end_with(self, response: Response) -> None:
        """No worker can be asked, or the request is at fault: end it with `response`, or as far as it has come."""
        if self.first_byte is None:
            self.answer(response)
            return
        if self.migration:
            self.migration.count("failed")
        self._cut(response.status, "The worker broke off its answer, and no other could go on.")

    def answer(self, response: Response, leg: Leg | None = None, end: End = "failed") -> None:
        """End the request with an answer of the router's own. `leg`: the latest attempt, which was given up."""
        if self._over:
            return
        self._finish(response.status, end, leg)
        path = self.request.head.path
        response = typed_for(path, response)
        if self.opened:
            self.connection.write(chunk(as_event(response.status, response.body, path)) + LAST_CHUNK)
            self.connection.finish(self.request.head.keep_alive)
            return
        self.connection.respond(with_request_id(self._routing.labelled(response), self.request_id))

    def _pass_on(self, response: Response, leg: Leg | None = None) -> None:
        """End the request, which is not over, with a prefill worker's own error. `leg`: as in `answer`."""
        self.first_byte = self.clock() - self.began
        self.answer(response, leg, "complete")

    def _finish(self, status: int, end: End, leg: Leg | None = None) -> None:
        """Give everything back, and tell how it ended. `leg`: as in `answer`."""
        self._over = True
        self._under_way.discard(self)
        attempt, split, now = self._attempt, self.split, self.clock()
        prompt, cached = None, None
        if attempt:
            leg = attempt.leg
            leg.reservation.release(now)
            if end == "complete":
                prompt, cached = attempt.complete()
            else:
                attempt.drop()
        parted = None
        if split:
            split.cancel()
            parted = split.parted
            leg = leg or split.pair.prefill
            # What the decode worker calls cached is what it fetched; the prefill worker may tell what it had cached.
            if cached is not None:
                cached = parted.answer.cached_tokens if parted else None
        self._attempt = self.split = self._interrupted = None  # they refer to this object
        self._routing.finished(Outcome(leg, status, end, self.first_byte, now - self.began, prompt, cached, parted))


def _may_have_harmed(leg: Leg, failure: Failure) -> bool:
    """Whether the request may be what broke the worker. One that is being removed was cut off for that reason."""
    return not (failure.harmless or leg.worker.pool.is_cut)


def _without(leg: Leg) -> list[frozenset[str]]:
    return [frozenset((leg.worker.id,))]


_NOBODY: frozenset[str] = frozenset()
_EVENTS = b"text/event-stream; charset=utf-8"
_LIVE = ((b"cache-control", b"no-cache"), UNBUFFERED)
