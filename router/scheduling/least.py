"""The least cost and the number of ties, as a compiled loop."""

from __future__ import annotations

import math

from indexer.jit import inlined, loop
from router.scheduling.candidates import Seconds


@inlined
def _least_from(costs: Seconds, first: int) -> tuple[int, int]:
    position, ties = first, 1
    for at in range(first + 1, len(costs)):
        if costs[at] < costs[position]:
            position, ties = at, 1
        elif costs[at] == costs[position]:
            ties += 1
    return position, ties


@loop
def least(costs: Seconds) -> tuple[int, int]:
    """Position of the first least cost, and how many costs equal it. `costs` must not be empty. NaN is least only where
    all are NaN."""
    position, ties = _least_from(costs, 0)
    if math.isnan(costs[position]):  # the first one is, and nothing is less than NaN
        while position < len(costs) - 1 and math.isnan(costs[position]):
            position += 1
        position, ties = _least_from(costs, position)
    return position, ties
