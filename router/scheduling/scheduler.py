"""Select and reserve: the choice itself has no side effect, and booking it is one step with nothing in between."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from indexer.matches import Matches
from router.scheduling.decision import Candidates, Choice, Costs, Decision, Figures, Policy, Uniform
from router.scheduling.load import LoadBook, Loads, Reservation
from router.scheduling.overlap import LOWER_TIER_CREDIT


class Scheduler:
    def __init__(self, policy: Policy, book: LoadBook, random: Uniform) -> None:
        self._policy = policy
        self._book = book
        self._random = random

    def select(
        self,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        pinned: bool = False,
    ) -> Decision:
        """Choose among `candidates`, of which there is one at least.

        `matches` None means that none were looked up. A `pinned` request takes the least loaded of its candidates, all
        of the worker that it named.
        """
        present = Present(candidates, prompt_tokens, matches, self._book, now)
        if pinned:
            choice = Choice(int(present.requests.argmin()), None, "named by the request")
        else:
            choice = self._policy.choose(present, self._random)
        if matches is None:
            return Decision(candidates, choice, prompt_tokens, None, None)
        overlaps = present.overlap_tokens
        return Decision(candidates, choice, prompt_tokens, int(overlaps[choice.position]), int(overlaps.max()))

    def reserve(self, decision: Decision) -> Reservation:
        """Book the decision's prefill and active tokens; the caller must release it, however the request ends."""
        return self._book.reserve(decision.rank, decision.prefill_tokens, decision.prompt_tokens)


class Present:
    """The situation at this moment, as a `decision.Situation`."""

    def __init__(
        self, candidates: Candidates, prompt_tokens: int, matches: Matches | None, book: LoadBook, now: float
    ) -> None:
        self.candidates = candidates
        self.prompt_tokens = prompt_tokens
        self._matches = matches
        self._book = book
        self._now = now

    @cached_property
    def _loads(self) -> Loads:
        return self._book.loads(self.candidates, self._now)

    @property
    def requests(self) -> Figures:
        return self._loads.requests

    @property
    def prefill_tokens(self) -> Figures:
        return self._loads.prefill_tokens

    @property
    def active_tokens(self) -> Figures:
        return self._loads.active_tokens

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
