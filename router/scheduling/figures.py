"""All figures that a policy may read of its candidates, computed by one compiled loop over the tables of the books.

Calling a kernel costs as much as some hundred candidates in it, and ten times that after the processor has slept
(docs/hot-path.md). So one call computes everything, whether it is read or not.

Table layouts and kernels are in one file because numba compiles the constants in, and caches the result until that file
changes (`indexer.jit`). `auto_costs` has the rows of the results compiled in, too: whoever changes those has to change
that file with them, or its cached kernels go on reading the former rows.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from indexer.jit import inlined, kernel, loop
from indexer.matches import Overlaps
from router.scheduling.candidates import Seconds
from router.scheduling.places import Positions

# -- a rank's column in the load book's table

# What this process has booked: requests, tokens to prefill, tokens of KV that are read, tokens that no cache held, and
# the sequences that engines run for these requests beyond one each.
REQUESTS, PREFILL, ACTIVE, NEW, FURTHER = range(5)
# The most sequences and active tokens that were booked at any moment since the last report; see `load`.
MOST_SEQUENCES, MOST_ACTIVE = range(5, 7)
# By the last report: foreign load, and KV memory in use beyond our own new tokens.
FOREIGN_REQUESTS, FOREIGN_TOKENS, BEYOND = range(7, 10)
# What MOST_* were when the last report came.
BEFORE_SEQUENCES, BEFORE_ACTIVE = range(10, 12)
LOAD_ROWS = 12
"""Rows of the load book in a shared table."""

# -- and in the backlog's

# In microseconds: all booked work, and that of the first in line (on a rank of factor 1); since when that is first (on
# the steady clock); all recent work, done or not, with exponential decay; when that was last added to.
WORK, HEAD, SINCE, LATELY, ADDED = range(5)
BACKLOG_ROWS = 5
MICRO = 1e6
"""Microseconds in a second."""
LATELY_MEMORY = 60.0
"""Seconds after which recent work counts 1/e."""
MUCH_LATER = 5.0
"""Seconds beyond twice the expected time after which the prefill under way is late."""

# -- the results: rows of `Situation.counts`, in requests or tokens, and of `Situation.estimates`, in seconds (CREDIT in
# tokens). `Situation` has a property for each but SLOTS, DISK (of LOWER, what is on disk) and UNDONE (of QUEUE, what is
# prefill and no wait for a slot).

IN_FLIGHT, TO_PREFILL, TO_READ, OWN, MEMORY, CAPACITY, SLOTS, OVERLAP, STORED, LOWER, DISK = range(11)
CREDIT, QUEUE, UNDONE, OWN_PREFILL, OWN_WORK, STEP, COMPUTED, LATE, AHEAD, LOAD, OWN_LOAD = range(11)

Tables = npt.NDArray[np.int64]
"""[process, row, place]"""
Counts = npt.NDArray[np.int64]
Coefficients = tuple[float, float, float]
"""Coefficients of a `latency.Shape`."""


@inlined
def _load(counts: Counts, at: int, tables: Tables, own: int, place: int, limits: Counts) -> None:
    """Writes the rows of `load.Loads`. Own load is the sum over all processes; foreign load is the same in each."""
    ours, further, prefill, active, new = 0, 0, 0, 0, 0
    for table in tables:
        ours += table[REQUESTS, place]
        further += table[FURTHER, place]
        prefill += table[PREFILL, place]
        active += table[ACTIVE, place]
        new += table[NEW, place]
    counts[IN_FLIGHT, at], counts[OWN, at] = ours + further + tables[own, FOREIGN_REQUESTS, place], ours
    counts[TO_PREFILL, at], counts[TO_READ, at] = prefill, active + tables[own, FOREIGN_TOKENS, place]
    counts[MEMORY, at] = max(0, new + tables[own, BEYOND, place])
    counts[CAPACITY, at], counts[SLOTS, at] = limits[0, place], limits[1, place]


@inlined
def _left(tables: Tables, place: int, factor: float, base: float, now: float) -> tuple[float, float]:
    """Seconds of work left, and how many of them stand for a late prefill (`MUCH_LATER`; 0 while it is not). `now`: in
    microseconds; `base`: fixed cost of the step under way, on a rank of factor 1.

    Each process has a first in line; the rank is computing the one that has been first for longest.
    """
    work, head, since = 0.0, 0.0, now
    for table in tables:
        work += table[WORK, place]
        if table[HEAD, place] > 0 and (head == 0.0 or table[SINCE, place] < since):
            head, since = float(table[HEAD, place]), float(table[SINCE, place])
    expected, passed = (head + base * MICRO) * factor, max(0.0, now - since)
    remains = abs(expected - passed) if head else 0.0
    late = remains if passed > 2.0 * expected + MUCH_LATER * MICRO else 0.0
    return max(0.0, (work - head) * factor + remains) / MICRO, late / MICRO


@inlined
def _slot_wait(requests: int, slots: int, residence: float) -> float:
    """Seconds until enough of the `requests` have ended for one more to be run, at the mean rate of release."""
    return max(0, requests + 1 - slots) * residence / max(1, requests)


@inlined
def _lately(tables: Tables, place: int, now: float) -> float:
    """Seconds of recent work. `now`: in microseconds."""
    lately = 0.0
    for table in tables:
        if table[LATELY, place]:
            lately += table[LATELY, place] * math.exp((table[ADDED, place] - now) / (LATELY_MEMORY * MICRO))
    return lately / MICRO


@inlined
def _prefill(shape: Coefficients, held: float, prompt: int) -> float:
    """Seconds of a prefill on a rank of factor 1 that holds `held` of `prompt` tokens."""
    new = max(0.0, prompt - held)
    return shape[0] + new * (shape[1] + shape[2] * (prompt - new / 2))


@inlined
def _step(shape: Coefficients, requests: int, active: int, prompt: int) -> float:
    """Seconds of a decode step on a rank of factor 1, with a request of `prompt` tokens added to `requests` that have
    `active` tokens."""
    return shape[0] + shape[1] * (requests + 1) + shape[2] * (active + prompt)


@kernel
def sum_loads(tables: Tables, own: int, places: Positions, limits: Counts) -> Counts:
    """The rows of `load.Loads`."""
    found = np.zeros((SLOTS + 1, len(places)), np.int64)
    for at, place in enumerate(places):
        _load(found, at, tables, own, place, limits)
    return found


@kernel
def seconds_left(tables: Tables, places: Positions, factors: Seconds, base: float, now: float) -> Seconds:
    """Seconds of work left at each place. `now`: in seconds; `base` as for `_left`."""
    left = np.zeros(len(places))
    for at, place in enumerate(places):
        left[at] = _left(tables, place, factors[at], base, now * MICRO)[0]
    return left


def matrices(ranks: int) -> tuple[Counts, Seconds]:
    """Counts and estimates of so many ranks, for `work_out` to fill."""
    return np.zeros((DISK + 1, ranks), np.int64), np.zeros((OWN_LOAD + 1, ranks))


@loop
def work_out(
    loads: Tables,
    own: int,
    load_places: Positions,
    limits: Counts,
    works: Tables,
    work_places: Positions,
    prefill_factors: Seconds,
    step_factors: Seconds,
    factor_places: Positions,
    prefill_shape: Coefficients,
    step_shape: Coefficients,
    blocks: Overlaps,
    cpu_blocks: Overlaps,
    gpu_blocks: Overlaps,
    block_sizes: Counts,
    uses_store: npt.NDArray[np.bool_],
    prompt: int,
    stored: int,
    lower_tier: float,
    residence: float,
    now: float,
    counts: Counts,
    estimates: Seconds,
) -> tuple[int, int]:
    """Fills `counts` and `estimates`, except the rows from AHEAD on. Returns the longest overlap in tokens, and how
    many ranks have a prefill to do.

    The first arguments are what `LoadBook.columns`, `Backlog.columns` and `LatencyModel.columns` return. `blocks`,
    `cpu_blocks`, `gpu_blocks`: leading blocks of the prompt that each rank holds in any tier, not on disk, and on the
    GPU. `uses_store`: which ranks can load the prompt's first `stored` tokens from a store. `lower_tier`: credit for a
    token in a tier below the GPU. `prompt` is in tokens, `now` in seconds, as is `residence`: how long a request stays
    at a rank. An engine always computes the last token itself, to get logits, so a prompt that is cached whole counts
    one block less.
    """
    ranks, best, busy, usable = len(block_sizes), 0, 0, max(0, prompt - 1)
    for at in range(ranks):
        _load(counts, at, loads, own, load_places[at], limits)

        size = block_sizes[at]
        most = usable // size * size
        held, gpu = min(blocks[at] * size, most), min(gpu_blocks[at] * size, most)
        beyond = max(0, min(stored, usable) // size * size - held) if uses_store[at] else 0
        credit = gpu + lower_tier * (held - gpu)
        counts[OVERLAP, at], counts[STORED, at], estimates[CREDIT, at] = held, beyond, credit
        counts[LOWER, at], counts[DISK, at] = max(0, held - gpu), max(0, held - cpu_blocks[at] * size)
        best = max(best, held)

        place = factor_places[at]
        factor, base = prefill_factors[place], prefill_shape[0]
        estimates[OWN_PREFILL, at] = own_seconds = factor * _prefill(prefill_shape, held + beyond, prompt)
        estimates[OWN_WORK, at] = own_seconds - factor * base
        step = _step(step_shape, counts[IN_FLIGHT, at], counts[TO_READ, at], prompt)
        estimates[STEP, at] = step_factors[place] * step
        left, late = _left(works, work_places[at], factor, base, now * MICRO)
        slot = _slot_wait(counts[IN_FLIGHT, at], counts[SLOTS, at], residence)
        estimates[QUEUE, at], estimates[UNDONE, at], estimates[LATE, at] = max(left, slot), left, late
        estimates[COMPUTED, at] = _lately(works, work_places[at], now * MICRO)
        busy += left > 0.0
    return best, busy
