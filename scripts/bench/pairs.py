"""Statistics of paired runs: each repeat measures everybody once, and ratios are taken within a repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """Median, least and greatest of the repeats' ratios."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}–{self.greatest:.2f})"


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    each = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
    return Ratio(statistics.median(each), min(each), max(each))


def order(count: int, repeat: int) -> list[int]:
    """Who goes when: everybody once, another first each time."""
    return [(position + repeat) % count for position in range(count)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; `ordered` is sorted and not empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
