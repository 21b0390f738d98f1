"""What policy `auto` has each candidate cost, as one compiled loop; `auto` says why."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.jit import kernel
from router.scheduling.decision import Figures, Seconds

SOON: Final = 0.05
"""A rank that has so few seconds of prefill before it may get any prompt: it must not fall idle while the router hears
of its progress."""
_SHARE: Final = 0.03
"""Of a prompt's own seconds, which it may find there too: to the longest that is nothing, and held back they would be
overtaken again and again."""
ENOUGH: Final = 0.4
"""Seconds of prefill that a rank may get together, about a step of 8,192 tokens: short prompts share what a step costs,
and a long one makes whoever is in a step with it wait for all of it (docs/adr/0005-auto-policy.md compares)."""
_ROOM: Final = 0.95
"""Share of a rank's KV that may be booked: requests in flight grow, and their blocks are rounded up."""
_STEPS: Final = 1.5
"""A new prefill waits for the step that is under way, half of one on average, and its own step decodes as well."""
_CROWD: Final = 0.25
"""Power of the number of requests on a rank: 1 is LMetric's product, which trades too much waiting for even batches
where prompts share nothing, 0 is predicted time to first token, which piles requests onto the holders of hot prefixes.
Of 0, 0.15, 0.25, 0.5 and 1 the best over six simulated workloads, by little (docs/adr/0005-auto-policy.md)."""


def memory_seconds(taken: Figures, new: Figures, capacity: Figures, residence: float) -> Seconds:
    """The wait for memory: until so many requests have ended that the prompt fits, at the mean rate of release."""
    excess = np.maximum(0.0, taken + new - _ROOM * capacity)
    waits: Seconds = excess * residence / np.maximum(1, taken)
    return waits


@kernel
def auto_costs(
    queue: Seconds,
    held: Seconds,
    own: Seconds,
    load: Seconds,
    own_load: Seconds,
    step: Seconds,
    requests: Figures,
    own_requests: Figures,
    taken: Figures,
    new: Figures,
    capacity: Figures,
    weight: float,
    load_delay: float,
    residence: float,
) -> tuple[Seconds, npt.NDArray[np.bool_]]:
    """What each candidate costs, and which a request may be sent to now.

    A rank that has none of ours is never waited for, whatever it reports: else others could keep us from it for ever.
    The wait for memory is that of `memory_seconds`.
    """
    values, may_go = np.zeros(len(queue)), np.zeros(len(queue), np.bool_)
    for at in range(len(queue)):
        excess = max(0.0, taken[at] + new[at] - _ROOM * capacity[at])
        memory = excess * residence / taken[at] if taken[at] else 0.0
        loads = load[at] + load_delay * own_load[at]
        seconds = queue[at] + held[at] + weight * own[at] + loads + _STEPS * step[at]
        values[at] = seconds * (requests[at] + 1.0) ** _CROWD + memory
        fits = queue[at] < max(SOON, _SHARE * own[at]) or queue[at] + own[at] < ENOUGH
        ready = fits and memory == 0.0 and held[at] == 0.0
        may_go[at] = ready or own_requests[at] == 0
    return values, may_go
