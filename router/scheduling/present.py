"""The situation at this moment, worked out as far as it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from indexer.matches import Matches
from router.scheduling.decision import Candidates, Costs, Figures, Seconds
from router.scheduling.latency import Prefill
from router.scheduling.load import Loads
from router.scheduling.overlap import LOWER_TIER_CREDIT, STORE_CREDIT
from router.scheduling.predictions import held_tokens

if TYPE_CHECKING:
    from router.scheduling.scheduler import Scheduler


class Present:
    """The situation at this moment, as a `decision.Situation`. What is None below was not asked for yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        held: Seconds | None = None,
        stored: int = 0,
    ) -> None:
        """`stored`: leading prompt tokens that lie in a shared store."""
        self.candidates = candidates
        self.prompt_tokens = prompt_tokens
        self.now = now
        self._scheduler = scheduler
        self.matches = matches
        self._held = held
        self._usable = max(0, prompt_tokens - 1)
        """An engine always computes the last token itself, to have logits: a whole hit is one block short."""
        self._stored = stored
        self._loads: Loads | None = None
        self._overlaps: tuple[Figures, Seconds, int] | None = None
        self._stored_tokens: Figures | None = None
        self._queue_seconds: Seconds | None = None
        self._prefill_seconds: Seconds | None = None
        self._own_load_seconds: Seconds | None = None
        self._load_seconds: Seconds | None = None
        self._step_seconds: Seconds | None = None

    @property
    def _load(self) -> Loads:
        if self._loads is None:
            self._loads = self._scheduler.book.loads(self.candidates, self.now)
        return self._loads

    @property
    def requests(self) -> Figures:
        return self._load.requests

    @property
    def own_requests(self) -> Figures:
        return self._load.own_requests

    @property
    def prefill_tokens(self) -> Figures:
        return self._load.prefill_tokens

    @property
    def active_tokens(self) -> Figures:
        return self._load.active_tokens

    @property
    def memory_tokens(self) -> Figures:
        return self._load.memory_tokens

    @property
    def capacity_tokens(self) -> Figures:
        return self._load.capacity_tokens

    @property
    def _overlap(self) -> tuple[Figures, Seconds, int]:
        """Tokens that each rank holds itself; the same, weighed by tier; the most of the former."""
        if self._overlaps is None:
            self._overlaps = self._look_up()
        return self._overlaps

    def _look_up(self) -> tuple[Figures, Seconds, int]:
        candidates, matches = self.candidates, self.matches
        if matches is None:
            nothing = np.zeros(len(candidates), np.int64)
            return nothing, nothing.astype(np.float64), 0
        blocks, gpu_blocks = matches.blocks_of(candidates), matches.gpu_blocks_of(candidates)
        return held_tokens(blocks, gpu_blocks, candidates.block_sizes, self._usable, LOWER_TIER_CREDIT)

    @property
    def overlap_tokens(self) -> Figures:
        return self._overlap[0]

    @property
    def best_overlap_tokens(self) -> int:
        """That any of the candidates has."""
        return self._overlap[2]

    @property
    def stored_tokens(self) -> Figures:
        if self._stored_tokens is None:
            self._stored_tokens = self._beyond() if self._stored else np.zeros(len(self.candidates), np.int64)
        return self._stored_tokens

    def _beyond(self) -> Figures:
        sizes = self.candidates.block_sizes
        most = min(self._stored, self._usable) // sizes * sizes
        beyond: Figures = np.maximum(0, most - self.overlap_tokens) * self.candidates.stored
        return beyond

    @property
    def credit_tokens(self) -> Costs:
        own = self._overlap[1]
        if not self._stored:
            return own
        credit: Costs = own + STORE_CREDIT * self.stored_tokens
        return credit

    # -- in seconds

    @property
    def queue_seconds(self) -> Seconds:
        if self._queue_seconds is None:
            factors = self._scheduler.latency.prefill_factors(self.candidates, self.now)
            self._queue_seconds = self._scheduler.backlog.seconds(self.candidates, factors, self.now)
        return self._queue_seconds

    @property
    def held_seconds(self) -> Seconds:
        if self._held is None:
            self._held = np.zeros(len(self.candidates))
        return self._held

    @property
    def prefill_seconds(self) -> Seconds:
        if self._prefill_seconds is None:
            held = self._overlap[1]
            if self._stored:
                held = held + self.stored_tokens
            latency = self._scheduler.latency
            self._prefill_seconds = latency.prefill_seconds(self.candidates, held, self.prompt_tokens, self.now)
        return self._prefill_seconds

    @property
    def load_seconds(self) -> Seconds:
        if not self._stored:
            return self.own_load_seconds
        if self._load_seconds is None:
            waits = self._scheduler.loads.wait_seconds(self.candidates, self.now)
            self._load_seconds = self.own_load_seconds + waits * (self.stored_tokens > 0)
        return self._load_seconds

    @property
    def own_load_seconds(self) -> Seconds:
        if self._own_load_seconds is None:
            loads, count = self._scheduler.loads, len(self.candidates)
            self._own_load_seconds = loads.own_seconds(self.stored_tokens) if self._stored else np.zeros(count)
        return self._own_load_seconds

    @property
    def loading(self) -> float:
        return self._scheduler.loads.busy(self.candidates, self.now)

    @property
    def whole_prefill_seconds(self) -> float:
        return self._scheduler.latency.prefill_work(Prefill(self.prompt_tokens, self.prompt_tokens))

    @property
    def step_seconds(self) -> Seconds:
        if self._step_seconds is None:
            latency, load = self._scheduler.latency, self._load
            self._step_seconds = latency.step_seconds(
                self.candidates, load.requests, load.active_tokens, self.prompt_tokens, self.now
            )
        return self._step_seconds

    @property
    def residence_seconds(self) -> float:
        return self._scheduler.latency.residence

    @property
    def busy(self) -> float:
        return self._scheduler.backlog.busy(self.candidates, self.now)
