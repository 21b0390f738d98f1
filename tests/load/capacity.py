"""The most requests a second that a router holds: open loop, step by step, until something fails or takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scripts.bench.load import Outcome

FIRST, FACTOR = 100.0, 1.5
"""Requests a second of the first step, and what each is of the one before."""
FINER = 2
"""Steps between the last that was held and the first that was not."""
EXPLODED = 0.1
"""Seconds of p99 from which on requests pile up: a hundred times what a router takes that keeps up."""
KEPT_UP = 0.95
"""Share of the asked rate that must have been answered."""

Run = Callable[[float], Outcome | None]
"""A step at so many requests a second; None where it failed altogether."""


class Held(NamedTuple):
    rate: float
    p99: float
    """Seconds."""
    steps: int


def most(run: Run, ceiling: float) -> Held:
    """Looks no higher than `ceiling`. A rate of 0: not even the first step was held."""
    held, failed, steps, rate = Held(0.0, 0.0, 0), 0.0, 0, min(FIRST, ceiling)
    while not failed and held.rate < ceiling:
        steps += 1
        p99 = _p99(run(rate), rate)
        held, failed = (held, rate) if p99 is None else (Held(rate, p99, steps), 0.0)
        rate = min(ceiling, rate * FACTOR)
    for _ in range(FINER if failed and held.rate else 0):
        steps += 1
        middle = (held.rate + failed) / 2
        p99 = _p99(run(middle), middle)
        held, failed = (held, middle) if p99 is None else (Held(middle, p99, steps), failed)
    return held._replace(steps=steps)


def _p99(outcome: Outcome | None, rate: float) -> float | None:
    """None: not held."""
    if outcome is None or outcome.errors or outcome.p99 > EXPLODED:
        return None
    return outcome.p99 if outcome.requests >= KEPT_UP * rate * outcome.seconds else None
