"""Draws other arrival times for the same requests (pure): a recorded trace is one sample, and bursts matter most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from router.ab.trace import Row
from router.simulation.traffic import Source, bursts, milliseconds, poisson

Arrivals = Literal["trace", "poisson", "bursts"]
_DRAWN = {"poisson": poisson, "bursts": bursts}


def rearrive(rows: Sequence[Row], arrivals: Arrivals, seed: int) -> list[Row]:
    """The rows in their order and at the trace's mean rate: with their own arrival times, or times drawn by `seed`."""
    seconds = (rows[-1].timestamp - rows[0].timestamp) / 1000
    if arrivals == "trace" or not seconds:
        return list(rows)
    moments = _DRAWN[arrivals](Source(seed), len(rows) / seconds, math.inf)
    drawn = zip(rows, itertools.islice(moments, len(rows)), strict=True)
    return [msgspec.structs.replace(row, timestamp=milliseconds(at)) for row, at in drawn]
