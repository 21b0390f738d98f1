"""Whether the router stayed as it was: lines fitted, quarters compared. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.soak.samples import Sample

LEAST_WARM_UP = 120.0
"""Seconds; a run shorter than twice that warms up for half of it."""


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
    memory = growth([each.at for each in samples], [each.rss for each in samples])
    open_files = growth([each.at for each in samples], [float(each.descriptors) for each in samples])
    return [
        Finding("growth of memory", f"{memory:+.1%}", f"≤ {limits.growth:.0%}", memory <= limits.growth),
        Finding("growth of open files", f"{open_files:+.1%}", "≤ 20%", open_files <= 0.2),
        _latency("p50", samples, lambda each: each.p50, limits.slower),
        _latency("p99", samples, lambda each: each.p99, limits.slower),
    ]


def growth(at: Sequence[float], values: Sequence[float]) -> float:
    """Of a straight line through the values: its end by its beginning, less one."""
    slope, start = statistics.linear_regression(at, values)
    first, last = start + slope * at[0], start + slope * at[-1]
    return last / first - 1


def _latency(name: str, samples: Sequence[Sample], read: Callable[[Sample], float | None], limit: float) -> Finding:
    """Medians of intervals, so that a moment's trouble on the machine does not count."""
    known = [value for each in samples if (value := read(each)) is not None]
    quarter = max(1, len(known) // 4)
    if len(known) < 4:
        return Finding(f"overhead, {name}", "not known", f"≤ {limit:g} ×", good=False)
    first, last = statistics.median(known[:quarter]), statistics.median(known[-quarter:])
    seen = f"{first:.2f} → {last:.2f} ms ({last / first:.2f} ×)"
    return Finding(f"overhead, {name}, first to last quarter", seen, f"≤ {limit:g} ×", last <= limit * first)
