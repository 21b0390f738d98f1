"""Axes: where a value lies, and which round values are written beside it (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WANTED = 5
"""Ticks, about."""
_MOST = 9


class Scale(NamedTuple):
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; what lies outside is moved to the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(values: Iterable[float], low: float | None = None) -> Scale:
    """From `low`, or else the round value below the least, to the round one above the greatest."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    bottom = min(known) if low is None else low
    top = max(*known, bottom)
    step = _step((top - bottom) / _WANTED or (abs(bottom) or 1.0) / _WANTED)
    first, last = math.floor(bottom / step + 1e-9), max(math.ceil(top / step - 1e-9), math.floor(bottom / step) + 1)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def logarithmic(values: Iterable[float]) -> Scale:
    """Between numbers such as 1, 2, 5, 10; ticks at all of these, or at the powers of ten where they are many."""
    known = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    powers = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    every = [float(f"{multiple}e{power}") for power in powers for multiple in (1, 2, 5)]
    low = max((tick for tick in every if tick <= min(known)), default=every[0])
    high = min(tick for tick in every if tick >= max(known) and tick > low)
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) > _MOST:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1.0")]
    return Scale(low, high, tuple(ticks), log=True)


def _step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))


def tick_text(value: float) -> str:
    """As short as it is exact; thousands with a k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 10):g}"
