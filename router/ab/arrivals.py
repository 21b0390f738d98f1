"""Prepares a trace's requests for a run (pure): which are sent, when they arrive, what they share.

A recorded trace is one sample, and bursts matter most; so other arrival times can be drawn for the same requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from router.ab.errors import RunError
from router.ab.trace import Row, stretch, without_reuse
from router.simulation.traffic import BURST_EVERY, Source, bursts, milliseconds, poisson

Arrivals = Literal["trace", "poisson", "bursts"]
_BURSTS = 4
"""Least number of bursts: a shorter trace has them more often, or it might end before the first."""

_LONGEST = 31 * 86_400
"""Seconds: a month, whose load reports alone take some minutes to simulate."""


def prepare(
    rows: Iterable[Row],
    seed: int,
    *,
    duration: float | None,
    limit: int | None,
    arrivals: Arrivals,
    reuse: bool,
    max_output: int | None = None,
) -> list[Row]:
    """The rows to send, if any are left; see `stretch`, `rearrive` and `without_reuse`."""
    kept = stretch(rows, duration, limit, max_output)
    if kept:
        kept = rearrive(kept, arrivals, seed)
    return kept if reuse else without_reuse(kept)


def check_ends(last: float) -> None:
    """`last`: the second of a run in which its last request comes. Raises RunError for one that is hardly meant."""
    if last > _LONGEST:
        when = f"the last request comes in second {last:.3g}, and a run lasts a month ({_LONGEST} s) at most"
        raise RunError(f"{when}; see the unit of the trace's timestamps, --duration, and --rate")


def rearrive(rows: Sequence[Row], arrivals: Arrivals, seed: int) -> list[Row]:
    """The rows in their order and at the trace's mean rate: with their own arrival times, or times drawn by `seed`."""
    seconds = (rows[-1].timestamp - rows[0].timestamp) / 1000
    if arrivals == "trace" or not seconds:
        return list(rows)
    drawn = zip(rows, itertools.islice(_moments(arrivals, seed, len(rows) / seconds, seconds), len(rows)), strict=True)
    return [msgspec.structs.replace(row, timestamp=milliseconds(at)) for row, at in drawn]


def _moments(arrivals: Arrivals, seed: int, rate: float, seconds: float) -> Iterator[float]:
    if arrivals == "poisson":
        return poisson(Source(seed), rate, math.inf)
    return bursts(Source(seed), rate, math.inf, min(BURST_EVERY, seconds / _BURSTS))
