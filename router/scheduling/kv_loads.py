"""What each rank is loading from one tier, a shared store or one of its own below the GPU, one prompt after the other,
and how long loads from there take.

The end of a load cannot be seen; it lies somewhere before the prompt's first token. Its time is estimated as the time
to the first token less the expected time of everything else. One such difference says little, so the speed is the sum
of many divided by the sum of what was expected of them. When no load is heard of for a while, it goes back to the
prior: ranks whose loads seem to take long are avoided, and could never show that they do not, or do no more.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.backlog import Backlog
from router.scheduling.candidates import Figures, Seconds
from router.scheduling.load import subtract
from router.scheduling.transfer import prior_seconds

_MEMORY: Final = 0.97
"""Each new observation multiplies the weight of all earlier ones by this."""
_LASTS: Final = 600.0
"""Seconds after which what was observed counts 1/e if nothing was since. So the five seconds that an engine took to
compile something at its first load are forgotten within an hour, and what a hundred loads have told not sooner."""
_PRIOR_WEIGHT: Final = 0.05
"""Seconds of expected loading for which the prior counts: a load of a few thousand tokens outweighs it."""
_OUTLIER: Final = 4.0
"""Observations are clipped to this factor from what was expected, except the first `_FEW`, as the prior may be off by
more."""
_FEW: Final = 4
"""Observations."""
_LEAST: Final = 1e-3
"""Least factor: observations are differences, whose sum may fall below 0."""


class Speed:
    """Observed over prior seconds of loads; `now` is in seconds on a steady clock."""

    def __init__(self) -> None:
        self._observed = self._expected = _PRIOR_WEIGHT
        self._at = -math.inf
        """When both were last added to."""
        self._count = 0

    def factor(self, now: float) -> float:
        observed, expected = self._faded(now)
        return max(_LEAST, observed / expected)

    def observe(self, work: float, seconds: float, now: float) -> None:
        """A load that takes `work` seconds by the prior took `seconds`: a difference of estimates, which may be below
        0."""
        if self._count >= _FEW:
            most = _OUTLIER * self.factor(now) * work
            seconds = min(max(seconds, -most), most)
        self._count += 1
        observed, expected = self._faded(now)
        self._observed, self._expected, self._at = _MEMORY * observed + seconds, _MEMORY * expected + work, now

    def _faded(self, now: float) -> tuple[float, float]:
        kept = math.exp(min(0.0, self._at - now) / _LASTS)
        prior = (1.0 - kept) * _PRIOR_WEIGHT
        return prior + kept * self._observed, prior + kept * self._expected


class KVLoads:
    """The loads that this process has booked. `now` is in seconds on a steady clock."""

    def __init__(self) -> None:
        self.tokens: Counter[WorkerRank] = Counter()
        """Tokens being loaded, by rank; only ranks that load."""
        self.speed = Speed()
        self.line = Backlog()

    def watch(self, rank: WorkerRank) -> None:
        self.line.watch(rank)

    def forget(self, rank: WorkerRank) -> None:
        """Loads under way there end without effect."""
        self.line.forget(rank)

    def wait_seconds(self, ranks: RankSet, now: float) -> Seconds:
        """Until the loads before it are done."""
        return self.line.seconds(ranks, np.full(len(ranks), self.speed.factor(now)), now)

    def own_seconds(self, tokens: Figures, now: float) -> Seconds:
        """Of a load of `tokens` alone; 0 for none."""
        seconds: Seconds = np.where(tokens > 0, self.speed.factor(now) * prior_seconds(tokens), 0.0)
        return seconds

    def busy(self, ranks: RankSet, now: float) -> float:
        """Share of `ranks` (0–1) that are loading."""
        return self.line.busy(ranks, now) if self.tokens else 0.0


class KVLoad:
    """One load, booked until its prompt's first token. `done` or `drop` must be called once."""

    __slots__ = ("_entry", "_loads", "_rank", "_tokens", "expected")

    def __init__(self, loads: KVLoads, rank: WorkerRank, tokens: int, now: float) -> None:
        self._loads = loads
        self._rank = rank
        self._tokens = tokens
        self._entry = loads.line.add(rank, prior_seconds(np.array([tokens])).item(), now)
        self.expected = loads.speed.factor(now) * self._entry.work
        """Seconds of the load alone."""
        loads.tokens[rank] += tokens

    def done(self, now: float, beside: float) -> None:
        """The first token is there. `beside`: the seconds until then that were expected of everything but the load."""
        seconds = self._loads.line.done(self._entry, now)
        if seconds is not None:
            self._loads.speed.observe(self._entry.work, seconds - beside, now)
        self._let_go()

    def drop(self, now: float) -> None:
        """End the booking without learning from it."""
        self._loads.line.drop(self._entry, now)
        self._let_go()

    def _let_go(self) -> None:
        subtract(self._loads.tokens, self._rank, self._tokens)
