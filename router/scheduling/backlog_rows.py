"""The rows of the backlog's table, and what they say of each rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from indexer.jit import kernel
from router.scheduling.decision import Seconds

# Rows, in microseconds: work booked, that of the first in line, and since when it is first (on the steady clock).
WORK, HEAD, SINCE = range(3)
BACKLOG_ROWS = 3
MICRO = 1e6
"""In a second."""


@kernel
def seconds_left(tables: npt.NDArray[np.int64], places: npt.NDArray[np.intp], factors: Seconds, now: float) -> Seconds:
    """Of the several processes' first in line, the one that has been first for longest is what the rank computes."""
    left = np.zeros(len(places))
    for number, place in enumerate(places):
        work, head, since = 0.0, 0.0, now
        for table in tables:
            work += table[WORK, place]
            if table[HEAD, place] > 0 and (head == 0.0 or table[SINCE, place] < since):
                head, since = float(table[HEAD, place]), float(table[SINCE, place])
        expected = head * factors[number]
        remains = abs(expected - max(0.0, now - since)) if head else 0.0
        left[number] = max(0.0, (work - head) * factors[number] + remains) / MICRO
    return left
