"""From a request to a worker: candidates, overlap, choice, booking; and what is learned from how it went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engines.shaping import rank_headers
from indexer.kv_indexer import KVIndexer, PromptHashes, hash_prompt
from indexer.matches import Matches
from indexer.types import Namespace, WorkerRank
from publishers.logs import log_event
from router.arms import Arm
from router.exchange import Leg, Outcome
from router.fleet import Fleet, Worker
from router.http.messages import ARM, Response, header_lines
from router.metrics import Metrics
from router.openai_errors import error_response
from router.scheduling.admission import Refusal
from router.scheduling.booking import Booking
from router.scheduling.decision import Candidates, Decision
from router.scheduling.load import LoadBook
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler

logger = logging.getLogger("router.routing")


class Prompt(NamedTuple):
    """What is known of a prompt. `hashes` None: overlaps are not looked up; `tokens` may then be an estimate, or 0."""

    tokens: int = 0
    hashes: PromptHashes | None = None


class Asked(NamedTuple):
    """What a request says of how it wants to be routed."""

    pinned: Worker | None = None
    """The worker that it names, which alone may serve it."""
    ttft_slo: float | None = None
    """Seconds."""
    priority: int = 0
    streamed: bool = False
    arm: Arm | None = None
    """Of a live A/B test."""


class Brain(NamedTuple):
    """The state that requests are routed on, and the pure parts that decide."""

    fleet: Fleet
    book: LoadBook
    scheduler: Scheduler
    queue: Queue
    indexer: KVIndexer
    metrics: Metrics
    clock: Callable[[], float]

    def hash_prompt(self, token_ids: Sequence[int], namespace: Namespace) -> Prompt:
        """Raises OverflowError or TypeError for what is no token id."""
        return Prompt(len(token_ids), hash_prompt(token_ids, self.fleet.block_sizes, namespace))

    def matches(self, prompt: Prompt) -> Matches | None:
        if prompt.hashes is None:
            return None
        self.indexer.expire(self.clock())
        return self.indexer.find_matches(prompt.hashes)


class RequestRouting:
    """Implements `exchange.Routing` and `queue.Waiting` for one request."""

    def __init__(self, brain: Brain, model: str | None, asked: Asked = Asked()) -> None:  # noqa: B008 -- immutable
        self._brain = brain
        self._model = model
        self._pinned = asked.pinned
        self._exclude: frozenset[str] = frozenset()
        self._routed: Callable[[Leg | Response], None] = _nowhere
        self.prompt = Prompt()
        self.arrived = brain.clock()
        self._began: float | None = None
        self.ttft_slo = asked.ttft_slo
        self.priority = asked.priority
        self.streamed = asked.streamed
        self._arm = asked.arm
        self.policy = asked.arm.policy if asked.arm else None

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Response], None]) -> None:
        self._exclude, self._routed = exclude, routed
        brain = self._brain
        if self._pinned is None:
            self._began = brain.clock()
            brain.queue.submit(self)
            self._began = None  # what is decided in a later pass is decided with others
            return
        candidates = self.candidates()
        if not candidates:
            self.nobody()
            return
        now = brain.clock()
        decision = brain.scheduler.select(candidates, self.prompt.tokens, self.matches(), now, pinned=True)
        self.send(decision, brain.scheduler.reserve(decision, now, self.streamed))

    def withdraw(self) -> None:
        self._brain.queue.withdraw(self)

    # -- queue.Waiting

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    def candidates(self) -> Candidates:
        return self._candidates(self._exclude)

    def matches(self) -> Matches | None:
        return self._brain.matches(self.prompt)

    def send(self, decision: Decision, booking: Booking) -> None:
        worker = self._brain.fleet.workers[decision.rank.worker_id]
        self._note(decision, worker)
        if self._began is not None:
            self._brain.metrics.tallies.decision.observe(self._brain.clock() - self._began)
        told = self._arm.answer_lines if self._arm else b""
        self._routed(Leg(worker, decision, booking, _rank_lines(worker, decision.rank), told))

    def refuse(self, refusal: Refusal) -> None:
        self._brain.metrics.tallies.refused[refusal.objective] += 1
        self._answer(_refused(refusal))

    def nobody(self) -> None:
        self._answer(self._nobody())

    def _answer(self, response: Response) -> None:
        if self._arm:
            response = response._replace(headers=(*response.headers, (ARM, self._arm.name.encode())))
        self._routed(response)

    # -- the rest of exchange.Routing

    def idlest_worker(self) -> Worker | None:
        """Of those that could serve the request."""
        brain, candidates = self._brain, self._candidates(frozenset())
        if not candidates:
            return None
        idlest = int(brain.book.loads(candidates, brain.clock()).requests.argmin())
        return brain.fleet.workers[candidates.ranks[idlest].worker_id]

    def can_retry(self, exclude: frozenset[str]) -> bool:
        return bool(self._candidates(exclude))

    def failed(self, worker: Worker, reason: str, retried: bool, unreachable: bool = False) -> None:
        if unreachable:  # the next health check may take it back
            self._brain.fleet.mark_down(worker, reason)
        tally = self._brain.metrics.tallies.worker(worker.id)
        tally.failures += 1
        tally.retries += retried
        log_event(logger, logging.WARNING, "Worker failed a request", worker=worker.id, reason=reason, retried=retried)

    def finished(self, outcome: Outcome) -> None:
        tallies = self._brain.metrics.tallies
        tallies.in_flight -= 1
        tally = tallies.worker(outcome.leg.worker.id if outcome.leg else "")
        tally.ends[outcome.status, outcome.end] += 1
        tally.duration.observe(outcome.duration)
        if outcome.first_byte is not None:
            tally.first_byte.observe(outcome.first_byte)
        if outcome.cached_tokens is not None:
            tally.reported_tokens += outcome.cached_tokens
        if self._arm:
            self._arm.tally.finished(outcome)

    def _candidates(self, exclude: frozenset[str]) -> Candidates:
        fleet = self._brain.fleet
        if self._pinned is None:
            return fleet.candidates(self._model, exclude)
        return fleet.candidates_of(self._pinned, self._model, exclude)

    def _nobody(self) -> Response:
        if self._pinned:
            why = self._pinned.trouble or f"it does not serve the model {self._model!r}"
            return error_response(503, f"Worker {self._pinned.id}, which the request names, cannot serve it: {why}.")
        what = "No worker is up" if self._model is None else f"No worker that serves {self._model!r} is up"
        return error_response(503, f"{what}; see /ready for what each worker lacks.")

    def _note(self, decision: Decision, worker: Worker) -> None:
        brain = self._brain
        tally = brain.metrics.tallies.worker(worker.id)
        tally.prompt_tokens += decision.prompt_tokens
        if decision.overlap_tokens is not None and decision.best_overlap_tokens is not None:
            tally.predicted_tokens += decision.overlap_tokens
            brain.metrics.tallies.regret_tokens += decision.best_overlap_tokens - decision.overlap_tokens
        if self._arm:
            self._arm.tally.routed(decision)
        if self.prompt.hashes:
            brain.indexer.predict(decision.rank, self.prompt.hashes, worker.block_size, brain.clock())


def _nowhere(leg: Leg | Response) -> None:
    """Where a request goes that was not routed yet."""


def _refused(refusal: Refusal) -> Response:
    what = "time to first token" if refusal.objective == "ttft" else "time between tokens"
    message = (
        f"Too busy: the predicted {what} is {refusal.predicted:.3g} s, and the objective {refusal.limit:.3g} s; "
        f"nothing was done for this request. Try again in {refusal.retry_after} s."
    )
    details = {"predicted_seconds": round(refusal.predicted, 4), "limit_seconds": refusal.limit}
    response = error_response(429, message, code=f"{refusal.objective}_slo", details=details)
    return response._replace(headers=((b"retry-after", b"%d" % refusal.retry_after),))


def _rank_lines(worker: Worker, rank: WorkerRank) -> bytes:
    """An engine with one rank is not told which."""
    description = worker.description
    if description is None or description.dp_size == 1:
        return b""
    return header_lines(rank_headers(description.kind, rank.dp_rank))
