"""Finds the knee of a workload: the request rate above which queues grow under every policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from router.simulation.run import Run, Runner

LIGHT: Final = 0.1
"""A rate, as a multiple of the trace's, at which requests hardly wait for each other."""
AT_LIGHT: Final = "overlap"
"""The policy taken as the best at that rate: without queues only the cached prefix matters."""
GROWTH: Final = 3.0
"""The knee is where the mean TTFT is this many times that at `LIGHT`."""
_FINE: Final = 1.23
"""The search ends when the knee lies between two rates of at most this ratio; the result is their geometric mean."""
_STRIDE: Final = 1.5
"""The ratio of one rate to the next, until the knee lies between two."""
FURTHEST: Final = 16.0
"""The highest rate tried."""

MakeRun = Callable[[str, int, float], Run]
"""(policy, seed, rate)"""


class Knee:
    """A search for the knee. `say` is called with a line of progress for each rate tried."""

    def __init__(
        self, run: MakeRun, policies: Sequence[str], seeds: Sequence[int], runs: Runner, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._policies = list(policies)
        self._failed: dict[str, float] = {}
        """The lowest rate at which each policy exceeded the limit."""
        self._seeds = seeds
        self._runs = runs
        self._say = say

    def is_light(self) -> bool:
        """Whether requests at `LIGHT` hardly wait for each other, without which `find` does not find a knee."""
        return self._ttft(AT_LIGHT, LIGHT) <= GROWTH * self._ttft(AT_LIGHT, LIGHT / 10)

    def find(self) -> float | None:
        """The highest rate at which some policy's mean TTFT is at most `GROWTH` times that at `LIGHT`, or None where
        that holds up to `FURTHEST`."""
        limit = GROWTH * self._ttft(AT_LIGHT, LIGHT)
        low, high = LIGHT, math.inf
        at = 1.0
        while high / low > _FINE and low < FURTHEST:
            if self._kept(at, limit):
                low = at
            else:
                high = at
            at = _next(low, high)
        return None if high == math.inf else round(math.sqrt(low * high), 2)

    def _ttft(self, policy: str, rate: float, limit: float | None = None) -> float:
        # A run may stop once it alone brings the mean over all seeds above the limit.
        most = None if limit is None else limit * len(self._seeds)
        runs = [self._run(policy, seed, rate)._replace(most_ttft=most) for seed in self._seeds]
        return fmean(figures.ttft.mean for figures in self._runs(runs))

    def _kept(self, rate: float, limit: float) -> bool:
        """Whether any policy keeps to the limit. Tries the last that did first, and skips those that failed at a lower
        rate."""
        for policy in [one for one in self._policies if rate < self._failed.get(one, rate + 1)]:
            ttft = self._ttft(policy, rate, limit)
            if ttft <= limit:
                self._say(f"rate {rate:.3f}: {policy} keeps to {limit:.3f} s with {ttft:.3f} s")
                self._policies.remove(policy)
                self._policies.insert(0, policy)
                return True
            self._failed[policy] = min(rate, self._failed.get(policy, rate))
        self._say(f"rate {rate:.3f}: nobody keeps to {limit:.3f} s")
        return False


def _next(low: float, high: float) -> float:
    """The next rate to try: higher or lower until the knee lies between two rates tried, then their geometric mean."""
    if high == math.inf:
        return min(low * _STRIDE, FURTHEST)
    return high / _STRIDE if low == LIGHT else math.sqrt(low * high)
