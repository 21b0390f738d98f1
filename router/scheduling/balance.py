"""Policies that use load alone, or nothing: round robin, random, least loaded, power of two choices."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from indexer.types import WorkerRank
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Choice, Situation, Uniform
from router.scheduling.least import least

_MOST_TURNS = 1 << 16
"""Most ranks whose turns are remembered, including ranks that have left: twice as many as an index takes."""


class RoundRobin:
    """The rank whose last turn is longest ago; ranks that never had one come first, in the order of their names.

    Candidates differ from request to request (models, retries, workers that come and go), so a simple pointer into one
    list would skip the same rank again and again.
    """

    def __init__(self) -> None:
        self._turns: dict[WorkerRank, int] = {}
        self._turn = 0
        self._candidates: Candidates | None = None
        self._queue: deque[int] = deque()
        """Positions in `_candidates`, the longest without a turn first."""

    def choose(self, situation: Situation, random: Uniform) -> Choice:  # noqa: ARG002 -- a Policy
        candidates = situation.candidates
        if candidates is not self._candidates:
            self._candidates, ranks = candidates, candidates.ranks
            if len(self._turns) > _MOST_TURNS:
                self._turns = dict(sorted(self._turns.items(), key=lambda item: item[1])[_MOST_TURNS // 2 :])
            self._queue = deque(sorted(range(len(ranks)), key=lambda position: self._turns.get(ranks[position], 0)))
        position = self._queue[0]
        self._queue.rotate(-1)
        self._turn += 1
        self._turns[candidates.ranks[position]] = self._turn
        return Choice(position, None, "next in turn")


class Random:
    def choose(self, situation: Situation, random: Uniform) -> Choice:
        return Choice(_below(len(situation.candidates), random), None, "random")


class LeastLoaded:
    """Fewest requests in flight; ties at random."""

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        return least_cost(situation.requests, random)


class PowerOfTwo:
    """The less loaded of two ranks drawn at random (Mitzenmacher 2001), which avoids herding when counts are stale."""

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        requests, count = situation.requests, len(situation.candidates)
        first = _below(count, random)
        second = (first + 1 + _below(count - 1, random)) % count if count > 1 else first
        position = first if requests[first] <= requests[second] else second
        return Choice(position, None, "less loaded of two")


def least_cost(costs: npt.NDArray[Any], random: Uniform) -> Choice:
    """The candidate of least cost; ties at random, so that routers with equal views do not herd."""
    position, ties = least(np.ascontiguousarray(costs, np.float64))
    if ties == 1:
        return Choice(position, costs, "least cost")
    position = int(np.flatnonzero(costs == costs[position])[_below(ties, random)])
    return Choice(position, costs, f"least cost, one of {ties} ties")


def _below(n: int, random: Uniform) -> int:
    return int(random.random() * n)
