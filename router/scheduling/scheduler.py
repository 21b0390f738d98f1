"""Select and reserve: the choice itself has no side effect, and booking it is one step with nothing in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, partial

import numpy as np

from indexer.matches import Matches
from indexer.types import WorkerRank
from router.scheduling.backlog import Backlog, Entry
from router.scheduling.decision import (
    Candidates,
    Choice,
    Costs,
    Decision,
    Figures,
    Policy,
    Prediction,
    Seconds,
    Uniform,
)
from router.scheduling.latency import LatencyModel, Prefill
from router.scheduling.load import LoadBook, Loads, Reservation
from router.scheduling.overlap import LOWER_TIER_CREDIT


class Scheduler:
    def __init__(
        self,
        policy: Policy,
        book: LoadBook,
        random: Uniform,
        backlog: Backlog | None = None,
        latency: LatencyModel | None = None,
    ) -> None:
        self._policy = policy
        self._random = random
        self.book = book
        self.backlog = backlog or Backlog()
        self.latency = latency or LatencyModel()
        self._unheard: deque[tuple[float, Booking]] = deque()
        self.changed: Callable[[], None] = _nothing
        """Called when a prefill is done or a request has ended."""

    def select(
        self,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        pinned: bool = False,
        held: Seconds | None = None,
        policy: Policy | None = None,
    ) -> Decision:
        """Choose among `candidates`, of which there is one at least.

        `matches` None means that none were looked up. A `pinned` request takes the least loaded of its candidates, all
        of the worker that it named. `held`: see `Situation.held_seconds`. `policy`: another than the scheduler's own.
        """
        self._settle(now)
        present = Present(self, candidates, prompt_tokens, matches, now, held)
        if pinned:
            choice = Choice(int(present.requests.argmin()), None, "named by the request")
        else:
            choice = (policy or self._policy).choose(present, self._random)
        if matches is None:
            return Decision(candidates, choice, prompt_tokens, None, None)
        overlaps, predict = present.overlap_tokens, partial(_predict, present, choice.position)
        return Decision(candidates, choice, prompt_tokens, int(overlaps[choice.position]), int(overlaps.max()), predict)

    def reserve(self, decision: Decision, now: float, streamed: bool = True) -> Booking:
        """Book the decision's prefill and active tokens; the caller must release it, however the request ends.

        Of an answer that is not `streamed` nobody hears before its end: its prefill counts as done when it should be.
        """
        predicted = None if streamed else decision.predicted
        booking = Booking(self, decision, now, streamed)
        if not streamed:
            self._unheard.append((now + (predicted.ttft if predicted else 0.0), booking))
        return booking

    def _settle(self, now: float) -> None:
        """In the order in which they were booked: an earlier one that takes longer holds up later ones."""
        while self._unheard and self._unheard[0][0] <= now:
            due, booking = self._unheard.popleft()
            booking.assume_first_token(due)

    def watch(self, rank: WorkerRank, block_size: int) -> None:
        """Keep books for `rank`, whose reports count blocks of `block_size` tokens."""
        self.book.watch(rank, block_size)
        self.backlog.watch(rank)
        self.latency.watch(rank)

    def forget(self, rank: WorkerRank) -> None:
        """Bookings in flight stay valid."""
        self.book.forget(rank)
        self.backlog.forget(rank)
        self.latency.forget(rank)


def _nothing() -> None:
    pass


def _predict(present: Present, position: int) -> Prediction:
    return Prediction(
        float(present.queue_seconds[position]),
        float(present.held_seconds[position]),
        float(present.prefill_seconds[position]),
        float(present.step_seconds[position]),
        not present.requests[position],
    )


class Booking:
    """One request's place on one rank: its load, its turn in the backlog, and what is learned from how it goes."""

    __slots__ = ("_booked", "_entry", "_prefill", "_rank", "_reservation", "_scheduler", "_streamed", "_token_at")

    def __init__(self, scheduler: Scheduler, decision: Decision, now: float, streamed: bool) -> None:
        self._scheduler = scheduler
        self._streamed = streamed
        self._rank = decision.rank
        self._prefill = Prefill(decision.prefill_tokens, decision.prompt_tokens)
        self._reservation: Reservation = scheduler.book.reserve(
            decision.rank, decision.prefill_tokens, decision.prompt_tokens
        )
        work = scheduler.latency.prefill_work(self._prefill)
        self._entry: Entry | None = scheduler.backlog.add(decision.rank, self._prefill, work, now)
        self._booked = now
        self._token_at: float | None = None
        """When a token was last heard of; None until the first."""

    def first_token(self, now: float) -> None:
        """The prefill is done. Again, or after the release: nothing."""
        if not self._streamed:  # the first that is heard is the whole answer
            self.assume_first_token(now)
            return
        entry, self._entry = self._entry, None
        self._reservation.first_token()
        if entry is None:
            return
        seconds = self._scheduler.backlog.done(entry, now)
        self._token_at = now
        if seconds is not None and self._prefill.prompt:
            self._scheduler.latency.observe_prefill(self._rank, self._prefill, seconds, now)
        self._scheduler.changed()

    def assume_first_token(self, now: float) -> None:
        """The prefill should be done; nothing is learned from that."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._reservation.first_token()
            self._scheduler.backlog.done(entry, now)
            self._scheduler.changed()

    def generated(self, tokens: int, now: float) -> None:
        """`tokens` more, since the last time or the first token; those before `first_token` came with it."""
        self._reservation.generated(tokens)
        if self._token_at is None:
            return
        latency, rank = self._scheduler.latency, self._rank
        passed, self._token_at = now - self._token_at, now
        if latency.observe_steps(rank, tokens, passed, now):
            load = self._scheduler.book.load(rank, now)
            latency.fold_steps(rank, load.requests, load.active_tokens, now)

    def release(self, now: float) -> None:
        """Give everything back; a second time does nothing."""
        if self._reservation.released:
            return
        self._reservation.release()
        entry, self._entry = self._entry, None
        if entry is not None:
            self._scheduler.backlog.drop(entry, now)
        else:
            self._scheduler.latency.observe_residence(now - self._booked)
        self._scheduler.changed()


class Present:
    """The situation at this moment, as a `decision.Situation`."""

    def __init__(
        self,
        scheduler: Scheduler,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        held: Seconds | None = None,
    ) -> None:
        self.candidates = candidates
        self.prompt_tokens = prompt_tokens
        self.now = now
        self._scheduler = scheduler
        self._matches = matches
        self._held = held

    @cached_property
    def _loads(self) -> Loads:
        return self._scheduler.book.loads(self.candidates, self.now)

    @property
    def requests(self) -> Figures:
        return self._loads.requests

    @property
    def own_requests(self) -> Figures:
        return self._loads.own_requests

    @property
    def prefill_tokens(self) -> Figures:
        return self._loads.prefill_tokens

    @property
    def active_tokens(self) -> Figures:
        return self._loads.active_tokens

    @property
    def memory_tokens(self) -> Figures:
        return self._loads.memory_tokens

    @property
    def capacity_tokens(self) -> Figures:
        return self._loads.capacity_tokens

    @cached_property
    def _usable(self) -> Figures:
        """An engine always computes the last token itself, to have logits: a whole hit is one block short."""
        sizes = self.candidates.block_sizes
        usable: Figures = max(0, self.prompt_tokens - 1) // sizes * sizes
        return usable

    @cached_property
    def overlap_tokens(self) -> Figures:
        candidates = self.candidates
        if self._matches is None:
            return np.zeros(len(candidates), np.int64)
        held: Figures = np.minimum(self._matches.blocks_of(candidates) * candidates.block_sizes, self._usable)
        return held

    @cached_property
    def credit_tokens(self) -> Figures | Costs:
        candidates, matches, held = self.candidates, self._matches, self.overlap_tokens
        if matches is None:
            return held
        gpu_blocks = matches.gpu_blocks_of(candidates)
        if gpu_blocks is matches.blocks_of(candidates):
            return held
        gpu = np.minimum(gpu_blocks * candidates.block_sizes, self._usable)
        credit: Costs = gpu + LOWER_TIER_CREDIT * (held - gpu)
        return credit

    # -- in seconds

    @cached_property
    def _factors(self) -> Seconds:
        return self._scheduler.latency.prefill_factors(self.candidates, self.now)

    @cached_property
    def queue_seconds(self) -> Seconds:
        return self._scheduler.backlog.seconds(self.candidates, self._factors, self.now)

    @cached_property
    def held_seconds(self) -> Seconds:
        return np.zeros(len(self.candidates)) if self._held is None else self._held

    @cached_property
    def prefill_seconds(self) -> Seconds:
        new = np.maximum(0.0, self.prompt_tokens - self.credit_tokens)
        return self._factors * self._scheduler.latency.prefill_works(new, self.prompt_tokens)

    @cached_property
    def whole_prefill_seconds(self) -> float:
        return self._scheduler.latency.prefill_work(Prefill(self.prompt_tokens, self.prompt_tokens))

    @cached_property
    def step_seconds(self) -> Seconds:
        tokens = self.active_tokens + self.prompt_tokens
        return self._scheduler.latency.step_seconds(self.candidates, self.requests + 1, tokens, self.now)

    @property
    def residence_seconds(self) -> float:
        return self._scheduler.latency.residence

    @cached_property
    def busy(self) -> float:
        return self._scheduler.backlog.busy(self.candidates)
