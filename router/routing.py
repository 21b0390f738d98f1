"""Routes one request: candidates, overlap, choice, booking; and records how it went."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from engines.disaggregation.answer import Prefilled
from engines.shaping import rank_headers
from indexer.kv_indexer import PromptHashes
from indexer.matches import Matches
from indexer.types import WorkerRank
from router.context import UNKNOWN, Prompt, RouterContext
from router.events.index_audit import Claim
from router.http.messages import ARM, CAME_BACK, Response, header_lines
from router.migration.migrating import Migration
from router.openai.errors import error_response
from router.predicted_blocks import PredictedBlocks
from router.proxy.failures import Failure
from router.proxy.legs import Leg, Pair, Part
from router.proxy.outcome import Outcome
from router.refusals import no_worker, over_length, pinned_worker_cannot, too_busy
from router.routing_log import log_decision, log_failure
from router.routing_options import RoutingOptions
from router.scheduling.admission import Refusal
from router.scheduling.booking import Booking
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Decision
from router.scheduling.others import Others
from router.scheduling.waiting import AnyRefusal
from router.split.bodies import SplitBodies
from router.tracing.spans import Spans
from router.worker_failures import note_failure
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_SLOWEST_TOKEN = 0.5
"""Seconds that a decode worker may take per token of an answer that is not streamed: ten times what a crowded engine
takes."""
_MOST_TOKENS = 1 << 31
"""More tokens than any answer has: clients may ask for any number."""
_FIRST = -(1 << 62)
"""A priority before all that clients may state."""
_NOBODY: frozenset[str] = frozenset()
_NONE = RoutingOptions()


class RequestRouting:
    """Implements `proxy.routing.Routing` and `scheduling.waiting.Waiting` for one request."""

    def __init__(self, context: RouterContext, model: str | None, options: RoutingOptions = _NONE) -> None:
        self._context = context
        self._pinned = options.pinned
        self._exclude: frozenset[str] = frozenset()
        self._engine = options.engine
        self._recomputed, self._uncached = options.recomputed, options.uncached
        self.too_short: frozenset[str] = frozenset()
        """Workers whose context is too short for it."""
        self._routed: Callable[[Leg | Pair | Response], None] = _ignore
        self._bodies = SplitBodies(options.body)
        self._prefilled: Leg | None = None
        """The latest leg that has computed the prompt for another."""
        self._given = options.body
        """The client's body, where it may have to be changed for a worker."""
        self._body: bytes | None = None
        """What is sent to the worker; None: the client's body."""
        self._name_rank = options.name_rank
        self._migration = options.migration
        self._goes_on = False
        """Its answer has begun and is continued on another worker, which `--migration-limit` bounds instead of the
        retry budget."""
        self.prompt = UNKNOWN
        self.arrived = context.clock()
        """When the request came."""
        self._submitted = self.arrived
        """When it was last given to the queue."""
        self._began: float | None = None
        """The same, but only during `Queue.submit`; None afterwards, so that it tells whether the request was held."""
        self._found: Matches | None = None
        """Who holds how much of the prompt, as of the last look, until the request is sent."""
        self._claim: Claim | None = None
        """What the audit of the index compares with the engine's report."""
        self._predicted = PredictedBlocks(context, options.uncached)
        self.ttft_slo = options.ttft_slo
        self.priority = options.priority
        self.tenant = options.tenant
        self.pinned = options.pinned is not None
        self.request_id = options.request_id
        self.streamed = options.streamed
        self.stored_tokens = 0
        self._arm = options.arm
        self._ended = options.ended
        self.policy = options.arm.policy if options.arm else None
        self.model = model
        """To choose workers by."""
        self.spans: Spans | None = None
        """Set while it is traced."""

    def pin(self, worker: Worker) -> None:
        """Let `worker` alone serve the request, which was not routed yet."""
        self._pinned, self.pinned = worker, True

    def rewrite(self, body: bytes) -> None:
        """Send `body` to workers instead of the client's."""
        self._body, self._bodies = body, SplitBodies(body)
        if self._migration:
            self._migration.rewrite(body)

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Pair | Response], None]) -> None:
        self._exclude, self._routed = exclude, routed
        self._began = self._submitted = self._context.clock()
        self._submit()
        self._began = None  # a later pass decides on several requests: its time is not this one's

    def _submit(self) -> None:
        try:
            self._context.queue.submit(self)
        except Exception as error:  # noqa: BLE001 -- `fail` tells of it
            self.withdraw()
            self.fail(error)

    def withdraw(self) -> None:
        self._context.queue.withdraw(self)
        if self._context.outage:
            self._context.outage.withdraw(self)

    # -- Waiting

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def others(self) -> Others:
        return self.prompt.others

    @property
    def adapter(self) -> str | None:
        return self._context.fleet.lora_name(self.model)

    def candidates(self) -> Candidates:
        return self._candidates(self._exclude)

    def matches(self) -> Matches | None:
        prompt = self.prompt
        if self._uncached and prompt.hashes:  # its engine will not use what it holds: no overlap is worth anything
            prompt = prompt._replace(hashes=PromptHashes(prompt.tokens, {}), begins=None)
        self._found = self._context.matches(prompt)
        return self._found

    def send(self, decision: Decision, booking: Booking) -> None:
        try:
            self._send(decision, booking)
        except Exception:  # whatever it is: release the booking and answer the client
            logger.exception("A request could not be sent")
            booking.release(self._context.clock())
            self._routed(error_response(500, "The router could not send the request."))

    def _send(self, decision: Decision, booking: Booking) -> None:
        routed = self._leg(decision, booking) if decision.split is None else self._pair(decision, booking)
        now = self._context.clock()
        self._routed(routed)
        try:
            self._record(decision, now)  # after the worker has got the request
        except Exception:  # whatever it is, the request is on its way
            logger.exception("A decision could not be recorded")
        decision.settle()
        self._found = None

    def _leg(self, decision: Decision, booking: Booking) -> Leg:
        worker = self._context.fleet.workers[decision.rank.worker_id]
        self._tell_breaker(worker)
        told = self._arm.answer_lines if self._arm else b""
        if self._context.has_store:
            told += b"x-router-store-tokens: %d\r\n" % decision.stored_tokens
        lines = _rank_lines(worker, decision.rank)
        part: Part = "whole" if decision.split is None else "prefill"
        if self.spans:
            lines += self.spans.begin_leg(part, decision.rank, decision.overlap_tokens)
        leg = Leg(worker, decision, booking, lines, told, self._with_rank(worker, decision.rank, self._body), part)
        if self._migration:
            self._migration.fill(leg)
        return leg

    def _with_rank(self, worker: Worker, rank: WorkerRank, body: bytes | None) -> bytes | None:
        """`body` with the rank in it, where that is the way to pick it. None, given or returned: the client's body."""
        given = self._given if body is None else body
        if self._name_rank is None or given is None or not _has_ranks(worker):
            return body
        return self._name_rank(given, rank.dp_rank)

    def _tell_breaker(self, worker: Worker) -> None:
        """A request is about to be sent to `worker`. If its breaker is half open, the request is the probe."""
        if not worker.breaker.quiet:
            self._context.fleet.sent(worker, self._context.clock())

    # -- in two parts

    def _pair(self, decision: Decision, booking: Booking) -> Pair:
        leg = self._leg(decision, booking)
        body, together = self._bodies.begin(leg.worker, decision.rank.dp_rank)
        leg.body = self._with_rank(leg.worker, decision.rank, body)
        decode = self._decode(leg, None, self._exclude) if together else None
        return Pair(leg, decode, self._bodies.number, self._context.leg_timeout, self._decode_timeout())

    def _decode_timeout(self) -> float | None:
        """An answer that is not streamed only begins when it is complete."""
        limit = self._context.leg_timeout
        if self.streamed:
            return limit
        tokens = self._bodies.most_tokens
        return None if tokens is None else limit + _SLOWEST_TOKEN * min(max(0, tokens), _MOST_TOKENS)

    def prefilled(self, prefill: Leg, answer: Prefilled) -> None:
        self._prefilled = prefill
        self._bodies.learn(prefill.worker, answer)
        if self.spans:
            self.spans.end_leg("prefill")
        if not prefill.worker.breaker.quiet:
            self.answered(prefill)

    def go_on(self, prefill: Leg, answer: Prefilled, exclude: frozenset[str]) -> Leg | Failure:
        try:
            leg = self._decode(prefill, answer, exclude)
        except ValueError as error:
            return Failure("error", f"cannot be followed: {error}")
        except Exception:  # whatever it is, the client gets an answer
            logger.exception("A decode worker could not be chosen")
            return Failure("unasked", "cannot be followed: the router could not choose a decode worker")
        return leg or Failure("unasked", "has computed the prompt, but no decode worker is left")

    def _decode(self, prefill: Leg, answer: Prefilled | None, exclude: frozenset[str]) -> Leg | None:
        """Choose and book the decode leg; None if no worker can decode. Raises ValueError for an answer that cannot be
        continued."""
        context = self._context
        decision = self._as_of_now(prefill, exclude)
        if decision is None:
            return None
        written = self._bodies.go_on(answer)
        now = context.clock()
        onward = context.scheduler.select_decode(decision, self.matches(), now, prefilled=answer is not None)
        worker = context.fleet.workers[onward.rank.worker_id]
        self._tell_breaker(worker)
        self._predicted.add(self.prompt, onward.rank, worker)
        named = b"x-router-prefill-worker: %s\r\n%s" % (prefill.worker.id.encode(), prefill.answer_lines)
        lines, body = _rank_lines(worker, onward.rank), self._with_rank(worker, onward.rank, written)
        if self.spans:
            lines += self.spans.begin_leg("decode", onward.rank, onward.overlap_tokens)
        # Booked last: after a fault before this there is nothing to give back.
        tokens, others = self.prompt.tokens, self.prompt.others
        booking = context.scheduler.reserve_decode(decision.rank, onward, tokens, now, self.streamed, others)
        if answer:
            booking.prefilled(now)
        return Leg(worker, prefill.decision, booking, lines, named, body, "decode")

    def _as_of_now(self, prefill: Leg, exclude: frozenset[str]) -> Decision | None:
        """The prefill's decision for the fleet as it is now; None if no worker can decode any more."""
        decision, others = prefill.decision, exclude - {prefill.worker.id}
        split = self._candidates(others).split
        if split is None or decision.rank not in split.prefills.ranks:
            split = self._context.fleet.split_of(prefill.worker, self.model, others | self._unfit())
        if split is None or decision.rank not in split.prefills.ranks:
            return None
        split = self._context.queue.room.decodes(split, self._context.clock())
        return decision.at(split, split.prefills.ranks.index(decision.rank))

    def refuse(self, refusal: AnyRefusal) -> None:
        tallies = self._context.metrics.tallies
        if isinstance(refusal, Refusal):
            tallies.refused[refusal.objective] += 1
        else:
            tallies.queue.refused[refusal.code] += 1
        self._routed(too_busy(refusal))

    def no_candidates(self) -> None:
        outage = self._context.outage
        if outage and outage.takes(self, self._context.clock()) and self._may_come_back():
            if not self._goes_on:  # those that are down now may be well again once they are up
                self._exclude &= {worker.id for worker in self._context.fleet.up}
            outage.hold(self)
        else:
            self.give_up()

    def _may_come_back(self) -> bool:
        """Whether a worker is down that could take the request."""
        if self._pinned:
            return self._pinned.state == "down"
        alone = self._bodies.refusal is not None
        return self._context.fleet.may_come_back(self.model, self._unfit(), alone)

    # -- outage.Waiting

    def try_again(self) -> bool:
        if self._pinned:  # it may have been removed and added again since
            self._pinned = self._context.fleet.workers.get(self._pinned.id, self._pinned)
        if not self._candidates(self._exclude):
            return False
        self._submit()
        return True

    def give_up(self) -> None:
        fleet, model = self._context.fleet, self.model
        if self._pinned:
            self._routed(pinned_worker_cannot(self._pinned, model))
        else:
            why, retried = self._bodies.refusal, bool(self._exclude)
            self._routed(
                no_worker(fleet, model, why, retried=retried, unfit=self._unfit(), too_long=self._over_length())
            )

    def _over_length(self) -> Response | None:
        """The answer to a request that no worker can take whole, if it is too long with the answer that it wants."""
        wanted, left = self._bodies.over_length, self._tokens_left()
        if wanted is None or left is None:
            return None
        return over_length(left + self.prompt.tokens, self.prompt.tokens, wanted)

    def fail(self, error: Exception) -> None:
        """Whatever it is, the client gets an answer."""
        logger.error("A request could not be routed", exc_info=error)
        self._routed(error_response(500, "The router could not find a worker for the request."))

    # -- the rest of `proxy.routing.Routing`

    def idlest_worker(self, exclude: frozenset[str]) -> Worker | None:
        """Of the workers that could serve the request, or a part of it; None if there are none but those in
        `exclude`."""
        context, candidates = self._context, self._candidates(exclude)
        if candidates.split is not None and not len(candidates):
            candidates = candidates.split.prefills
        if not candidates:
            return None
        idlest = int(context.book.loads(candidates, context.clock()).requests.argmin())
        return context.fleet.workers[candidates.ranks[idlest].worker_id]

    def can_retry(self, exclude: frozenset[str]) -> bool:
        context = self._context
        has = context.retries.has(context.clock(), context.metrics.tallies.in_flight)
        return has and bool(self._candidates(exclude))

    def waits_for(self, unreachable: frozenset[str]) -> bool:
        context = self._context
        outage = context.outage
        if outage is None or not outage.takes(self, context.clock()):
            return False
        return not self._candidates(unreachable)

    def resume(self, migration: Migration, exclude: frozenset[str]) -> frozenset[str] | None:
        self._bodies = SplitBodies(None)  # one worker continues it alone
        # Its first token is out: a refusal would waste what was generated, and the others have nothing yet.
        self.ttft_slo, self.priority = math.inf, _FIRST
        tokens = migration.tokens
        if tokens is not None and not self.prompt.guessed:
            hashed = self.prompt.hashes is not None
            self.prompt = self._context.hash_prompt(tokens, migration.namespace) if hashed else Prompt(len(tokens))
        fleet = self._context.fleet
        exclude |= {worker.id for worker in fleet.workers.values() if not migration.takes(worker)}
        self._goes_on = True
        return exclude if self._candidates(exclude) else None

    def answered(self, leg: Leg) -> None:
        self._context.fleet.answered(leg.worker, self._context.clock())

    def failed(self, leg: Leg, failure: Failure, retried: bool) -> None:
        context = self._context
        if self.spans:
            self.spans.end_leg(leg.part, failure.reason)
        note_failure(context.fleet, leg, failure, context.clock())
        # A worker that has computed the prompt holds it, even if the failure is that nobody is left to decode.
        if failure.harmless and leg is not self._prefilled:
            self._predicted.take_back(self.prompt, leg)
        if retried and not self._goes_on and self._candidates(_NOBODY):  # else it waits until a worker is up
            context.retries.take()
        if failure.kind != "unasked":  # no worker is to blame
            context.metrics.tallies.failed(leg, retried)
        log_failure(leg, failure, retried, self.request_id)

    def labelled(self, response: Response) -> Response:
        if self._arm is None:
            return response
        return response._replace(headers=(*response.headers, (ARM, self._arm.name.encode())))

    def finished(self, outcome: Outcome) -> None:
        self._routed = _ignore  # breaks a reference cycle
        self._context.metrics.tallies.in_flight -= 1
        if self._ended:
            self._ended()
        try:
            if self.spans:
                self.spans.end(outcome)
            self._count(_with_implied_zero(outcome))
        except Exception:  # whatever it is, the client gets its answer, or the end of it, and its next one
            logger.exception("A request could not be counted")

    def _count(self, outcome: Outcome) -> None:
        context, leg = self._context, outcome.leg
        if 400 <= outcome.status < 500 and leg and outcome.end == "complete":  # the answer is the worker's own
            self._predicted.take_back(self.prompt, leg)
        if outcome.status == CAME_BACK and leg:
            context.fleet.loop_found(leg.worker, context.clock())
        context.metrics.tallies.finished(outcome, self.streamed)
        context.metrics.lifecycle.finished(outcome)
        if self._arm:
            self._arm.tally.finished(outcome)
        if self._claim and context.audit:
            context.audit.finished(self._claim, outcome, context.clock())

    def _candidates(self, exclude: frozenset[str]) -> Candidates:
        fleet = self._context.fleet
        if self._pinned is not None:
            return fleet.candidates_of(self._pinned, self.model, exclude)
        unfit = self._unfit()
        found = fleet.candidates(self.model, exclude, unfit)
        if found.split is None or self._bodies.can(found.split, self._tokens_left()):
            return found
        return fleet.candidates_alone(self.model, exclude, unfit)

    def _unfit(self) -> frozenset[str]:
        """Workers that cannot take it. Looked up each time: while the request waits, workers come, and others tell
        which engine they run."""
        if self._engine is None:
            return self.too_short
        return self.too_short | self._context.fleet.other_engines(self._engine)

    def _tokens_left(self) -> int | None:
        """Tokens that the prompt leaves of the longest context of any worker; None if that is not known."""
        fleet, prompt = self._context.fleet, self.prompt
        base = fleet.base_model(self.model)
        if base is None or prompt.hashes is None or prompt.guessed:
            return None
        most = fleet.context_lengths(base.id).most
        return None if most is None else most - prompt.tokens

    def _record(self, decision: Decision, now: float) -> None:
        """Record the decision, which was made at `now`."""
        context, tallies = self._context, self._context.metrics.tallies
        if self._began is not None:
            tallies.decision.observe(now - self._began)
        else:
            tallies.queue.wait.observe(now - self._submitted)
        tallies.routed(decision)
        log_decision(decision, self.request_id)
        worker = context.fleet.workers[decision.rank.worker_id]
        was_looked_up = self.prompt.ids is not None and not self._uncached
        stored = self.stored_tokens if was_looked_up else None
        context.metrics.lifecycle.routed(decision, worker.block_size, self.prompt.hashes, stored)
        if self._arm:
            self._arm.tally.routed(decision)
        comparable = not self._recomputed and not self.prompt.guessed
        if context.audit and self._found is not None and self.prompt.hashes and comparable:
            self._claim = context.audit.claim(decision, self._found, self.prompt.hashes, now)
        self._predicted.add(self.prompt, decision.rank, worker)


def _with_implied_zero(outcome: Outcome) -> Outcome:
    """The outcome with cached tokens of 0 if the worker leaves zeros out; not for two parts, where the prefill worker
    reports."""
    leg, told = outcome.leg, outcome.cached_tokens
    if leg is None or outcome.prompt_tokens is None or leg.part != "whole":
        return outcome
    meant = leg.worker.reported(told)
    return outcome if meant == told else outcome._replace(cached_tokens=meant)


def _ignore(leg: Leg | Pair | Response) -> None:
    """Stands for the callback before and after routing."""


def _rank_lines(worker: Worker, rank: WorkerRank) -> bytes:
    """Header lines that name the rank; none for an engine with one rank."""
    found = worker.description
    if found is None or found.dp_size < 2:
        return b""
    return header_lines(rank_headers(worker.engine, found.asked_from + rank.dp_rank))


def _has_ranks(worker: Worker) -> bool:
    return worker.description is not None and worker.description.dp_size > 1
