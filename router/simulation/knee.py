"""The knee of a workload: the rate from which on queues grow whatever is done about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from router.simulation.run import Run, Runner

LIGHT: Final = 0.1
"""The rate at which a request meets no other's work, times the trace's own."""
AT_LIGHT: Final = "overlap"
"""Who stands for the best there: where nothing queues, a prefix is all that counts."""
GROWTH: Final = 3.0
"""Of mean TTFT between that and the knee."""
_FINE: Final = 1.23
"""The search ends when the knee lies between two rates of this ratio; what is said is the middle."""
_STRIDE: Final = 1.5
FURTHEST: Final = 16.0
"""The search goes no further."""

MakeRun = Callable[[str, int, float], Run]
"""(policy, seed, rate)"""


class Knee:
    """Looks for it. `say` hears of each rate that was tried."""

    def __init__(
        self, run: MakeRun, policies: Sequence[str], seeds: Sequence[int], runs: Runner, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._policies = list(policies)
        self._failed: dict[str, float] = {}
        """The least rate at which each did not keep to the limit."""
        self._seeds = seeds
        self._runs = runs
        self._say = say

    def is_light(self) -> bool:
        """Whether requests at `LIGHT` hardly wait for each other: else what is found by it is no knee."""
        return self._ttft(AT_LIGHT, LIGHT) <= GROWTH * self._ttft(AT_LIGHT, LIGHT / 10)

    def find(self) -> float | None:
        """The greatest rate at which some policy's mean TTFT is at most `GROWTH` times that at `LIGHT`. None: it is so
        at every rate up to `FURTHEST`."""
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
        # A run that alone takes the mean over all seeds beyond the limit need not go on.
        most = None if limit is None else limit * len(self._seeds)
        runs = [self._run(policy, seed, rate)._replace(most_ttft=most) for seed in self._seeds]
        return fmean(figures.ttft.mean for figures in self._runs(runs))

    def _kept(self, rate: float, limit: float) -> bool:
        """Whether anybody keeps to the limit. Who did last is asked first, and nobody who failed at less."""
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
    """Further up or down, until the knee lies between two rates that were tried; then in their middle."""
    if high == math.inf:
        return min(low * _STRIDE, FURTHEST)
    return high / _STRIDE if low == LIGHT else math.sqrt(low * high)
