"""What a page is made from: plain results of any comparison, one for each policy, rate and seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from router.page.intervals import Interval, mean_interval, ratio_interval, ratio_of

TTFT_MEAN, TTFT_P99 = "TTFT s mean", "TTFT s p99"
TPOT_MEAN = "TPOT ms mean"
HITS = "cached prompt tokens %"
BUSY = "machine busy, of it this run %"
"""Title of `Comparison.busy`."""
IN_TIME = "within TTFT SLO %"
"""Titles that charts are drawn of, where results have them."""


class Figure(NamedTuple):
    """One number of a result. `compared`: a ratio to the baseline says something."""

    title: str
    form: str = "{:.3f}"
    compared: bool = True


class Result(NamedTuple):
    """One policy at one rate with one seed. `values`: by a figure's title, NaN for what is not known."""

    policy: str
    rate: float
    seed: int
    values: Mapping[str, float]
    ttft: Sequence[float] = ()
    """Seconds, of every answered request."""
    imbalance: Sequence[tuple[float, float]] = ()
    """Seconds since the start; the busiest worker over the mean in a window that begins then."""
    busy: tuple[float, float] | None = None
    """Shares of the machine that anything used, and that this run did; None where it does not matter."""
    warnings: Sequence[str] = ()
    intervals: Mapping[str, Interval] = {}
    """Of values, by title, where one run tells them; they count where there is one seed."""


def run_name(policy: str, rate: float, seed: int, single: bool) -> str:
    """The name of a run; with a `single` rate and seed that of its policy is enough."""
    return policy if single else f"{policy} at rate {rate:g}, seed {seed}"


def has_ratios(policies: Collection[str], baseline: str) -> bool:
    """Whether any that ran is compared with `baseline`: a run that ended early may lack that, or all others."""
    return len(policies) > 1 and baseline in policies


class Comparison(NamedTuple):
    """A page's whole content."""

    title: str
    about: str
    """A sentence on the load."""
    results: Sequence[Result]
    baseline: str
    figures: Sequence[Figure]
    rate_unit: str
    """What a rate counts, as an axis tells it."""
    times: str
    """A sentence on what a second is."""
    facts: Sequence[tuple[str, str]]
    """How it was made: command, versions, settings."""
    intervals: str = ""
    """A sentence on where intervals come from, if not from seeds."""

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(result.policy for result in self.results))

    @property
    def relates(self) -> bool:
        return has_ratios(self.policies, self.baseline)

    @property
    def rates(self) -> list[float]:
        return sorted({result.rate for result in self.results})

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    @property
    def single(self) -> bool:
        """Whether there is only one rate and one seed."""
        return len(self.rates) == len(self.seeds) == 1

    def of(self, policy: str, rate: float) -> list[Result]:
        """By seed."""
        found = (result for result in self.results if (result.policy, result.rate) == (policy, rate))
        return sorted(found, key=lambda result: result.seed)

    def has(self, title: str) -> bool:
        return any(not math.isnan(result.values.get(title, math.nan)) for result in self.results)

    def busy(self, policy: str, rate: float) -> str:
        """Of the busiest run: how much of the machine was in use, and how much of it by the run, in percent."""
        shares = [result.busy for result in self.of(policy, rate) if result.busy]
        return "{:.0f}, {:.0f}".format(*(share * 100 for share in max(shares))) if shares else "–"

    def mean(self, title: str, policy: str, rate: float) -> Interval:
        known = [_known(result, title) for result in self.of(policy, rate)]
        return known[0] if len(known) == 1 else mean_interval([one.mean for one in known])

    def ratio(self, title: str, policy: str, rate: float) -> Interval:
        """To the baseline, over the seeds that both were run with."""
        base = {result.seed: _known(result, title) for result in self.of(self.baseline, rate)}
        known = {result.seed: _known(result, title) for result in self.of(policy, rate)}
        both = sorted(base.keys() & known.keys())
        if len(both) == 1:
            return ratio_of(known[both[0]], base[both[0]])
        return ratio_interval([known[seed].mean for seed in both], [base[seed].mean for seed in both])


def _known(result: Result, title: str) -> Interval:
    return result.intervals.get(title, Interval(result.values.get(title, math.nan)))
