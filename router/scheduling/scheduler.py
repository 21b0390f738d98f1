"""Select and reserve: the choice itself has no side effect, and booking it is one step with nothing in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from indexer.prefix_index import Overlap
from indexer.types import WorkerRank
from router.scheduling.decision import Candidate, Decision, Policy, Uniform
from router.scheduling.load import LoadBook, Reservation
from router.scheduling.overlap import LOWER_TIER_CREDIT


class Scheduler:
    def __init__(self, policy: Policy, book: LoadBook, random: Uniform) -> None:
        self._policy = policy
        self._book = book
        self._random = random

    def select(
        self,
        ranks: Sequence[tuple[WorkerRank, int]],
        prompt_tokens: int,
        matches: Mapping[WorkerRank, Overlap] | None,
        now: float,
        pinned: bool = False,
    ) -> Decision:
        """Choose among `ranks`, (rank, block size in tokens) each, never empty.

        `matches` are overlaps in blocks; None means that none were looked up. A `pinned` request takes the least loaded
        of `ranks`, all of the worker it named.
        """
        candidates = [self._candidate(rank, size, prompt_tokens, matches, now) for rank, size in ranks]
        if pinned:
            index = min(range(len(candidates)), key=lambda i: candidates[i].load.requests)
            return _decision(candidates, index, {}, "named by the request", prompt_tokens, matches)
        position, costs, reason = self._policy.choose(candidates, prompt_tokens, self._random)
        return _decision(candidates, position, costs, reason, prompt_tokens, matches)

    def reserve(self, decision: Decision) -> Reservation:
        """Book the decision's prefill and active tokens; the caller must release it, however the request ends."""
        return self._book.reserve(decision.rank, decision.prefill_tokens, decision.prompt_tokens)

    def _candidate(
        self, rank: WorkerRank, size: int, prompt_tokens: int, matches: Mapping[WorkerRank, Overlap] | None, now: float
    ) -> Candidate:
        load = self._book.load(rank, now)
        overlap = matches.get(rank) if matches else None
        if overlap is None:
            return Candidate(rank, load)
        # An engine always computes the last token itself, to have logits: a whole hit is one block short.
        usable = max(0, prompt_tokens - 1) // size * size
        total = min(overlap.blocks * size, usable)
        gpu = min(overlap.gpu_blocks * size, usable)
        return Candidate(rank, load, total, gpu + LOWER_TIER_CREDIT * (total - gpu))


def _decision(
    candidates: Sequence[Candidate],
    index: int,
    costs: Mapping[WorkerRank, float],
    reason: str,
    prompt_tokens: int,
    matches: Mapping[WorkerRank, Overlap] | None,
) -> Decision:
    chosen = candidates[index]
    if matches is None:
        return Decision(chosen.rank, reason, costs, prompt_tokens, None, None)
    best = max(candidate.overlap_tokens for candidate in candidates)
    return Decision(chosen.rank, reason, costs, prompt_tokens, chosen.overlap_tokens, best)
