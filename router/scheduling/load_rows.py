"""The rows of the load book's table, and their sum over the processes that keep one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from indexer.jit import kernel

# What is ours (of the tokens, also those that no cache held), the most that was booked at once since the last report,
# foreign load, and what the last report had of memory beyond our new tokens.
REQUESTS, PREFILL, ACTIVE, NEW, MOST_REQUESTS, MOST_ACTIVE, FOREIGN_REQUESTS, FOREIGN_TOKENS, BEYOND = range(9)
LOAD_ROWS = 9
"""How many the books need of a shared table."""


@kernel
def sum_loads(
    tables: npt.NDArray[np.int64], own: int, places: npt.NDArray[np.intp], capacity: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], ...]:
    """In the order of `load.Loads`. What is ours is the sum over all processes; what is foreign each of them knows."""
    count = len(places)
    requests, prefill, active = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    ours, memory, capacities = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for at in range(count):
        place = places[at]
        for table in tables:
            ours[at] += table[REQUESTS, place]
            prefill[at] += table[PREFILL, place]
            active[at] += table[ACTIVE, place]
            memory[at] += table[NEW, place]
        requests[at] = ours[at] + tables[own, FOREIGN_REQUESTS, place]
        active[at] += tables[own, FOREIGN_TOKENS, place]
        memory[at] = max(0, memory[at] + tables[own, BEYOND, place])
        capacities[at] = capacity[place]
    return requests, prefill, active, ours, memory, capacities
