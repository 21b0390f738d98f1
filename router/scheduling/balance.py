"""Policies that look at load alone, or at nothing."""

from __future__ import annotations

from collections.abc import Sequence

from indexer.types import WorkerRank
from router.scheduling.decision import Candidate, Choice, Uniform


class RoundRobin:
    """The rank whose last turn is longest ago, in the order of names among those that never had one.

    Candidates differ from request to request (models, retries, workers that come and go): a pointer into one order
    would pass over the same rank again and again.
    """

    def __init__(self) -> None:
        self._turns: dict[WorkerRank, int] = {}
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:  # noqa: ARG002 -- a Policy
        ranks = [candidate.rank for candidate in candidates]
        chosen = min(ranks, key=lambda rank: (self._turns.get(rank, 0), rank))
        self._turn += 1
        self._turns[chosen] = self._turn
        return Choice(ranks.index(chosen), {}, "next in turn")


class Random:
    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:  # noqa: ARG002 -- a Policy
        return Choice(_below(len(candidates), random), {}, "random")


class LeastLoaded:
    """Fewest requests in flight; ties at random."""

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:  # noqa: ARG002 -- a Policy
        return least_cost(candidates, [float(candidate.load.requests) for candidate in candidates], random)


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher 2001): no herd onto one worker when counts are stale."""

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:  # noqa: ARG002 -- a Policy
        first = _below(len(candidates), random)
        second = (first + 1 + _below(len(candidates) - 1, random)) % len(candidates) if len(candidates) > 1 else first
        drawn = (first, second)
        index = min(drawn, key=lambda i: candidates[i].load.requests)
        return Choice(
            index, {candidates[i].rank: float(candidates[i].load.requests) for i in drawn}, "less loaded of two"
        )


def least_cost(candidates: Sequence[Candidate], costs: Sequence[float], random: Uniform) -> Choice:
    """The candidate of least cost; ties at random, so that equal views do not herd."""
    least = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == least]
    index = ties[_below(len(ties), random)] if len(ties) > 1 else ties[0]
    by_rank = {candidate.rank: cost for candidate, cost in zip(candidates, costs, strict=True)}
    return Choice(index, by_rank, "least cost" if len(ties) == 1 else f"least cost, one of {len(ties)} ties")


def _below(n: int, random: Uniform) -> int:
    return int(random.random() * n)
