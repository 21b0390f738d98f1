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
NORMAL_95 = 1.96


class Interval(NamedTuple):
    """`low` and `high` are None where there is one value only; all is NaN where there is none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        """The greater one, where the value is not in the middle."""
        return None if self.low is None or self.high is None else max(self.high - self.mean, self.mean - self.low)


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


def ratio_of(value: Interval, base: Interval) -> Interval:
    """Of two that are independent of each other. On the scale of logarithms, where a ratio is a difference, an end is
    as far away as the ends that lead there together (MOVER: Zou and Donner 2008)."""
    ratio = value.mean / base.mean if base.mean else math.nan
    if value.low is None or value.high is None or base.low is None or base.high is None or not ratio > 0:
        return Interval(ratio)
    down = math.hypot(_apart(value.low, value.mean), _apart(base.mean, base.high))
    up = math.hypot(_apart(value.mean, value.high), _apart(base.low, base.mean))
    return Interval(ratio, ratio * math.exp(-down), ratio * math.exp(up))


def ratio_text(ratio: float) -> str:
    """An end of an interval over two seeds may have eleven digits, which tell no more than a few."""
    if ratio < 100:
        return f"{ratio:.2f}"
    return f"{ratio:.0f}" if ratio < 10_000 else ">9999"


def _apart(low: float, high: float) -> float:
    return math.log(high / low) if low > 0 else math.inf


def _t(freedom: int) -> float:
    """Beyond the table, the first terms of t's expansion about the normal, exact to three digits there."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
