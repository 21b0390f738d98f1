"""Means over seeds with 95 % confidence intervals (pure).

Requests of one run share queues and caches, so they are no independent samples: only runs with different seeds are. A
single run therefore has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1."""
_NORMAL_95 = 1.96


class Known(NamedTuple):
    """A value of one run, and its standard error where that is known otherwise than from seeds."""

    value: float
    error: float | None = None


class Interval(NamedTuple):
    """`low` and `high` are None where there is one value only; all is NaN where there is none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        return None if self.high is None else self.high - self.mean


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the values that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Interval(math.nan)
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Interval(mean)
    variance = math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1)
    half = _t(len(known) - 1) * math.sqrt(variance / len(known))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(values: Sequence[float], baselines: Sequence[float]) -> Interval:
    """Of value over baseline, seed by seed: what a seed makes harder for both cancels. The mean is geometric."""
    pairs = [(value, base) for value, base in zip(values, baselines, strict=True) if not math.isnan(value + base)]
    if not all(value > 0 and base > 0 for value, base in pairs):
        return Interval(math.nan)
    mean, low, high = mean_interval([math.log(value / base) for value, base in pairs])
    return Interval(math.exp(mean), None if low is None else math.exp(low), None if high is None else math.exp(high))


def known_interval(known: Known) -> Interval:
    if known.error is None or math.isnan(known.error):
        return Interval(known.value)
    half = _NORMAL_95 * known.error
    return Interval(known.value, known.value - half, known.value + half)


def known_ratio(known: Known, base: Known) -> Interval:
    """The logarithm of a mean is as good as normal where its error is small beside it (the delta method)."""
    ratio = known.value / base.value if base.value else math.nan
    errors = [one.error / one.value for one in (known, base) if one.error is not None and one.value > 0]
    if len(errors) < 2 or math.isnan(ratio + sum(errors)):
        return Interval(ratio)
    factor = math.exp(_NORMAL_95 * math.hypot(*errors))
    return Interval(ratio, ratio / factor, ratio * factor)


def _t(freedom: int) -> float:
    """Beyond the table, the first terms of t's expansion about the normal, exact to three digits there."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = _NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
