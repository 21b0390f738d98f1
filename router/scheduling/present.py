"""The situation at this moment, worked out as far as it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from propcache.api import cached_property  # functools' takes a lock to work out each, before Python 3.12

from indexer.jit import kernel
from indexer.matches import Matches, Overlaps
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
        self._usable = max(0, prompt_tokens - 1)
        """An engine always computes the last token itself, to have logits: a whole hit is one block short."""
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
    def _overlaps(self) -> tuple[Figures, Seconds, int]:
        """Tokens that each rank holds itself; the same, weighed by tier; the most of the former."""
        candidates, matches = self.candidates, self.matches
        if matches is None:
            nothing = np.zeros(len(candidates), np.int64)
            return nothing, nothing.astype(np.float64), 0
        blocks, gpu_blocks = matches.blocks_of(candidates), matches.gpu_blocks_of(candidates)
        return _held_tokens(blocks, gpu_blocks, candidates.block_sizes, self._usable, LOWER_TIER_CREDIT)

    @property
    def overlap_tokens(self) -> Figures:
        return self._overlaps[0]

    @property
    def best_overlap_tokens(self) -> int:
        """That any of the candidates has."""
        return self._overlaps[2]

    @cached_property
    def stored_tokens(self) -> Figures:
        candidates = self.candidates
        if not self._stored:
            return np.zeros(len(candidates), np.int64)
        sizes = candidates.block_sizes
        beyond = min(self._stored, self._usable) // sizes * sizes
        stored: Figures = np.maximum(0, beyond - self.overlap_tokens) * candidates.stored
        return stored

    @cached_property
    def credit_tokens(self) -> Costs:
        own = self._overlaps[1]
        if not self._stored:
            return own
        credit: Costs = own + STORE_CREDIT * self.stored_tokens
        return credit

    # -- in seconds

    @cached_property
    def queue_seconds(self) -> Seconds:
        factors = self._scheduler.latency.prefill_factors(self.candidates, self.now)
        return self._scheduler.backlog.seconds(self.candidates, factors, self.now)

    @cached_property
    def held_seconds(self) -> Seconds:
        return np.zeros(len(self.candidates)) if self._held is None else self._held

    @cached_property
    def prefill_seconds(self) -> Seconds:
        held = self._overlaps[1]
        if self._stored:
            held = held + self.stored_tokens
        return self._scheduler.latency.prefill_seconds(self.candidates, held, self.prompt_tokens, self.now)

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
        latency, loads = self._scheduler.latency, self._loads
        return latency.step_seconds(self.candidates, loads.requests, loads.active_tokens, self.prompt_tokens, self.now)

    @property
    def residence_seconds(self) -> float:
        return self._scheduler.latency.residence

    @cached_property
    def busy(self) -> float:
        return self._scheduler.backlog.busy(self.candidates, self.now)


@kernel
def _held_tokens(
    blocks: Overlaps, gpu_blocks: Overlaps, sizes: Figures, usable: int, lower_tier: float
) -> tuple[Figures, Seconds, int]:
    held, credit, best = np.zeros(len(blocks), np.int64), np.zeros(len(blocks)), 0
    for at in range(len(blocks)):
        size = sizes[at]
        most = usable // size * size
        held[at] = min(blocks[at] * size, most)
        gpu = min(gpu_blocks[at] * size, most)
        credit[at] = gpu + lower_tier * (held[at] - gpu)
        best = max(best, held[at])
    return held, credit, best
