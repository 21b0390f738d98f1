"""What policy `auto` has each candidate cost, as one compiled loop; `auto` says why."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.jit import inlined, kernel
from router.scheduling.decision import Figures, Seconds
from router.scheduling.figures import (
    AHEAD,
    CAPACITY,
    COMPUTED,
    IN_FLIGHT,
    LOAD,
    MEMORY,
    OVERLAP,
    OWN,
    OWN_LOAD,
    OWN_PREFILL,
    OWN_WORK,
    QUEUE,
    STEP,
    Counts,
)

SOON: Final = 0.05
"""A rank that has so few seconds of prefill before it may get any prompt: it must not fall idle while the router hears
of its progress."""
_SHARE: Final = 0.03
"""Of a prompt's own seconds, which it may find there too: to the longest that is nothing, and held back they would be
overtaken again and again."""
ENOUGH: Final = 0.35
"""Seconds of prefill that a rank may get together, about a step of 8,192 tokens: short prompts share what a step costs,
and a long one makes whoever is in a step with it wait for all of it (docs/adr/0005-auto-policy.md compares)."""
_ROOM: Final = 0.95
"""Share of a rank's KV that may be booked: requests in flight grow, and their blocks are rounded up."""
_SPREAD: Final = 0.1
"""Of a request's own prefill, which costs so much more on the rank that computed most of late: what it stores drives
out what was stored before, and where little is asked for nothing else would tell idle ranks apart, but for the noise in
what they were seen to take. The busier the fleet, the less: its queues tell them apart."""
_STEPS: Final = 1.5
"""A new prefill waits for the step that is under way, half of one on average, and its own step decodes as well."""


def memory_seconds(taken: Figures, new: Figures, capacity: Figures, residence: float) -> Seconds:
    """The wait for memory: until so many requests have ended that the prompt fits, at the mean rate of release."""
    excess = np.maximum(0.0, taken + new - _ROOM * capacity)
    waits: Seconds = excess * residence / np.maximum(1, taken)
    return waits


@inlined
def _crowd(requests: int) -> float:
    """The fourth root. The requests themselves would make it LMetric's product, which trades too much waiting for even
    batches where prompts share nothing; 1 makes it predicted time to first token, which piles requests onto the holders
    of hot prefixes. Of the powers 0, 0.15, 0.25, 0.5 and 1 the best over six simulated workloads, by little
    (docs/adr/0005-auto-policy.md)."""
    return math.sqrt(math.sqrt(requests + 1.0))


@inlined
def _seconds(
    counts: Counts, estimates: Seconds, at: int, base: float, work: float, weight: float, load_delay: float
) -> float:
    """As in `auto_costs`, but for `_SPREAD`, which is no loss, and the wait for memory."""
    seconds = estimates[QUEUE, at] + estimates[AHEAD, at] + base + weight * work
    seconds += estimates[LOAD, at] + load_delay * estimates[OWN_LOAD, at] + _STEPS * estimates[STEP, at]
    return float(seconds * _crowd(counts[IN_FLIGHT, at]))


@inlined
def _rent(
    counts: Counts,
    estimates: Seconds,
    values: Seconds,
    may_go: npt.NDArray[np.bool_],
    weight: float,
    load_delay: float,
) -> tuple[int, int, float]:
    """The cheapest candidate; of those that hold less of the prompt the cheapest that it may go to, or −1; and how much
    less than the first the best of those would cost if it held as much: 0 where that is nothing, or where the first has
    no room."""
    least, other, best = int(values.argmin()), -1, math.inf
    if not may_go[least]:
        return least, other, 0.0
    held, work = counts[OVERLAP, least], estimates[OWN_WORK, least]
    base = estimates[OWN_PREFILL, least] - work
    for at in range(len(values)):
        if counts[OVERLAP, at] >= held:
            continue
        if may_go[at] and (other < 0 or values[at] < values[other]):
            other = at
        # A step's base, which is in every prefill, tells how quick a rank is.
        quick = (estimates[OWN_PREFILL, at] - estimates[OWN_WORK, at]) / base if base > 0.0 else 1.0
        best = min(best, _seconds(counts, estimates, at, quick * base, quick * work, weight, load_delay))
    paid = _seconds(counts, estimates, least, base, work, weight, load_delay) - best
    return least, other, max(0.0, paid) if other >= 0 else 0.0


@kernel
def auto_costs(
    counts: Counts, estimates: Seconds, prompt: int, weight: float, load_delay: float, residence: float
) -> tuple[Seconds, npt.NDArray[np.bool_], int, int, float]:
    """What each candidate costs, and which a request may be sent to now; and as of `_rent`.

    A rank that has none of ours is never waited for, whatever it reports: else others could keep us from it for ever.
    The wait for memory is that of `memory_seconds`.
    """
    ranks = counts.shape[1]
    values, may_go = np.zeros(ranks), np.zeros(ranks, np.bool_)
    most = max(1e-9, estimates[COMPUTED].max())
    for at in range(ranks):
        taken, new = counts[MEMORY, at], prompt - counts[OVERLAP, at]
        excess = max(0.0, taken + new - _ROOM * counts[CAPACITY, at])
        memory = excess * residence / taken if taken else 0.0
        queue, held = estimates[QUEUE, at], estimates[AHEAD, at]
        own, work = estimates[OWN_PREFILL, at], estimates[OWN_WORK, at]
        loads = estimates[LOAD, at] + load_delay * estimates[OWN_LOAD, at]
        spread = _SPREAD / weight * own * estimates[COMPUTED, at] / most
        seconds = queue + held + (own - work) + weight * work + spread + loads + _STEPS * estimates[STEP, at]
        values[at] = seconds * _crowd(counts[IN_FLIGHT, at]) + memory
        fits = queue < max(SOON, _SHARE * own) or queue + work < ENOUGH
        ready = fits and memory == 0.0 and held == 0.0
        may_go[at] = ready or counts[OWN, at] == 0
    least, other, rent = _rent(counts, estimates, values, may_go, weight, load_delay)
    return values, may_go, least, other, rent
