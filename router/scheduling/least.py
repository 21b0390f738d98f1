"""The least cost and the number of ties, as a compiled loop."""

from __future__ import annotations

from indexer.jit import loop
from router.scheduling.decision import Seconds


@loop
def least(costs: Seconds) -> tuple[int, int]:
    """Position of the first least cost, and how many costs equal it. `costs` must not be empty."""
    position, ties = 0, 1
    for at in range(1, len(costs)):
        if costs[at] < costs[position]:
            position, ties = at, 1
        elif costs[at] == costs[position]:
            ties += 1
    return position, ties
