"""What each rank loads from a shared store, one prompt after the other, and how long that takes.

A load ends unseen, somewhere before its prompt's first token: what passed until then is taken less what was expected of
the rest. A single one of these differences says little, so speed is the sum of many over the sum of what they should
have been.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.backlog import Backlog
from router.scheduling.decision import Figures, Seconds
from router.scheduling.load import subtract
from router.scheduling.transfer import prior_seconds

_MEMORY: Final = 0.97
"""Of the weight of all earlier observations, with each new one."""
_PRIOR_WEIGHT: Final = 0.05
"""Seconds: a few thousand tokens tell more."""
_OUTLIER: Final = 4.0
"""An observation further than this factor from what is expected counts as this far; but for the first `_FEW`, as the
prior may be off by more."""
_FEW: Final = 4
_LEAST: Final = 1e-3


class Speed:
    """`factor`: how much longer loads take than `prior_seconds` says."""

    def __init__(self) -> None:
        self._observed = self._expected = _PRIOR_WEIGHT
        self._count = 0

    @property
    def factor(self) -> float:
        return max(_LEAST, self._observed / self._expected)

    def observe(self, work: float, seconds: float) -> None:
        """`work` took `seconds`, which may be below 0 where they were reckoned from others."""
        if self._count >= _FEW:
            most = _OUTLIER * self.factor * work
            seconds = min(max(seconds, -most), most)
        self._count += 1
        self._observed = _MEMORY * self._observed + seconds
        self._expected = _MEMORY * self._expected + work


class StoreLoads:
    """As far as this process has booked them. `now` is in seconds on one steady clock."""

    def __init__(self) -> None:
        self.tokens: Counter[WorkerRank] = Counter()
        """Under way, of each rank that loads."""
        self.speed = Speed()
        self.line = Backlog()

    def watch(self, rank: WorkerRank) -> None:
        self.line.watch(rank)

    def forget(self, rank: WorkerRank) -> None:
        """Loads in flight there end without effect."""
        self.line.forget(rank)

    def wait_seconds(self, ranks: RankSet, now: float) -> Seconds:
        """Until those before it are done."""
        return self.line.seconds(ranks, np.full(len(ranks), self.speed.factor), now)

    def own_seconds(self, tokens: Figures) -> Seconds:
        """Of a load of so many tokens itself; 0 for none."""
        seconds: Seconds = np.where(tokens > 0, self.speed.factor * prior_seconds(tokens), 0.0)
        return seconds

    def busy(self, ranks: RankSet, now: float) -> float:
        """The share of `ranks`, 0-1, that load."""
        return self.line.busy(ranks, now) if self.tokens else 0.0


class StoreLoad:
    """One, booked until its prompt has its first token; `done` or `drop` must be called once."""

    __slots__ = ("_entry", "_loads", "_rank", "_tokens")

    def __init__(self, loads: StoreLoads, rank: WorkerRank, tokens: int, now: float) -> None:
        self._loads = loads
        self._rank = rank
        self._tokens = tokens
        self._entry = loads.line.add(rank, prior_seconds(np.array([tokens])).item(), now)
        loads.tokens[rank] += tokens

    def done(self, other: float, now: float) -> None:
        """The first token is there; `other` seconds until then should not have been the load's."""
        seconds = self._loads.line.done(self._entry, now)
        if seconds is not None:
            self._loads.speed.observe(self._entry.work, seconds - other)
        self._let_go()

    def drop(self, now: float) -> None:
        """Nothing can be learned of it."""
        self._loads.line.drop(self._entry, now)
        self._let_go()

    def _let_go(self) -> None:
        subtract(self._loads.tokens, self._rank, self._tokens)
