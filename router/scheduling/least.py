"""The least of costs, and how many are as low."""

from __future__ import annotations

from indexer.jit import loop
from router.scheduling.decision import Seconds


@loop
def least(costs: Seconds) -> tuple[int, int]:
    """Position of the first of the least costs, and how many there are; at least one cost."""
    position, ties = 0, 1
    for at in range(1, len(costs)):
        if costs[at] < costs[position]:
            position, ties = at, 1
        elif costs[at] == costs[position]:
            ties += 1
    return position, ties
