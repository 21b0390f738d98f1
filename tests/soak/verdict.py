"""Whether the router stayed as it was: lines fitted, quarters compared. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.soak.samples import Sample

LEAST_WARM_UP = 120.0
"""Seconds; a run shorter than twice that warms up for half of it."""
MOST_FILES = 0.2
"""Growth of the number of open files under load, as a share."""
MOST_LEFT = 4
"""Open files more than before the load when all is over: the router's own connections to workers come and go."""


class Limits(NamedTuple):
    growth: float = 0.05
    """Of the memory, from the end of the warm-up to the end, as a share of what it was."""
    slower: float = 1.2
    """Overhead of the last quarter by that of the first."""


class Finding(NamedTuple):
    what: str
    seen: str
    limit: str
    good: bool


def warm_up(seconds: float) -> float:
    """How much of a run is left out."""
    return max(0.2 * seconds, min(LEAST_WARM_UP, 0.5 * seconds))


def judge(samples: Sequence[Sample], limits: Limits) -> list[Finding]:
    """Of samples after the warm-up. ValueError for too few."""
    if len(samples) < 4:
        raise ValueError("a run too short to tell anything")
    at = [each.at for each in samples]
    return [
        _growth("memory", at, [each.rss for each in samples], limits.growth),
        _growth("open files", at, [float(each.descriptors) for each in samples], MOST_FILES),
        _latency("p50", samples, lambda each: each.p50, limits.slower),
        _latency("p99", samples, lambda each: each.p99, limits.slower),
    ]


def growth(at: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Of a straight line through the values: its end by its beginning, less one; and by how much that may be chance:
    two standard errors of the slope. (A handful of samples of 36 files, give or take the requests in flight, has shown
    23 % where nothing grew.)"""
    slope, start = statistics.linear_regression(at, values)
    first, seconds = start + slope * at[0], at[-1] - at[0]
    off = sum((value - start - slope * when) ** 2 for when, value in zip(at, values, strict=True))
    spread = sum((when - statistics.fmean(at)) ** 2 for when in at)
    error = math.sqrt(off / (len(at) - 2) / spread)
    return slope * seconds / first, 2 * error * seconds / first


def _growth(what: str, at: Sequence[float], values: Sequence[float], limit: float) -> Finding:
    seen, chance = growth(at, values)
    return Finding(f"growth of {what}", f"{seen:+.1%} ± {chance:.1%}", f"≤ {limit:.0%}", seen - chance <= limit)


def _latency(name: str, samples: Sequence[Sample], read: Callable[[Sample], float | None], limit: float) -> Finding:
    """Medians of intervals, so that a moment's trouble on the machine does not count."""
    known = [value for each in samples if (value := read(each)) is not None]
    quarter = max(1, len(known) // 4)
    if len(known) < 4:
        return Finding(f"overhead, {name}", "not known", f"≤ {limit:g} ×", good=False)
    first, last = statistics.median(known[:quarter]), statistics.median(known[-quarter:])
    seen = f"{first:.2f} → {last:.2f} ms ({last / first:.2f} ×)"
    return Finding(f"overhead, {name}, first to last quarter", seen, f"≤ {limit:g} ×", last <= limit * first)
