"""The situation at this moment, worked out as far as it is asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from indexer.matches import Matches
from router.scheduling.decision import Candidates, Costs, Figures, Seconds
from router.scheduling.latency import Prefill
from router.scheduling.load import Loads
from router.scheduling.overlap import LOWER_TIER_CREDIT, STORE_CREDIT

if TYPE_CHECKING:
    from router.scheduling.scheduler import Scheduler


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
        stored: int = 0,
    ) -> None:
        """`stored`: leading prompt tokens that lie in a shared store."""
        self.candidates = candidates
        self.prompt_tokens = prompt_tokens
        self.now = now
        self._scheduler = scheduler
        self.matches = matches
        self._held = held
        self._stored = stored

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
        if self.matches is None:
            return np.zeros(len(candidates), np.int64)
        held: Figures = np.minimum(self.matches.blocks_of(candidates) * candidates.block_sizes, self._usable)
        return held

    @cached_property
    def stored_tokens(self) -> Figures:
        candidates = self.candidates
        if not self._stored:
            return np.zeros(len(candidates), np.int64)
        beyond = np.minimum(self._stored // candidates.block_sizes * candidates.block_sizes, self._usable)
        stored: Figures = np.maximum(0, beyond - self.overlap_tokens) * candidates.stored
        return stored

    @cached_property
    def credit_tokens(self) -> Figures | Costs:
        if not self._stored:
            return self._own_credit
        credit: Costs = self._own_credit + STORE_CREDIT * self.stored_tokens
        return credit

    @cached_property
    def _own_credit(self) -> Figures | Costs:
        candidates, matches, held = self.candidates, self.matches, self.overlap_tokens
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
        held = self._own_credit + self.stored_tokens if self._stored else self._own_credit
        new = np.maximum(0.0, self.prompt_tokens - held)
        return self._factors * self._scheduler.latency.prefill_works(new, self.prompt_tokens)

    @cached_property
    def load_seconds(self) -> Seconds:
        if not self._stored:
            return self.own_load_seconds
        waits = self._scheduler.loads.wait_seconds(self.candidates, self.now)
        return self.own_load_seconds + waits * (self.stored_tokens > 0)

    @cached_property
    def own_load_seconds(self) -> Seconds:
        if not self._stored:
            return np.zeros(len(self.candidates))
        return self._scheduler.loads.own_seconds(self.stored_tokens)

    @property
    def loading(self) -> float:
        return self._scheduler.loads.busy(self.candidates, self.now)

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
        return self._scheduler.backlog.busy(self.candidates, self.now)
