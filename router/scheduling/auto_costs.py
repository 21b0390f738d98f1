"""The costs of policy `auto`, computed for all candidates in one compiled loop. `auto` explains them."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.jit import inlined, kernel, loop
from router.scheduling.candidates import Figures, Seconds
from router.scheduling.figures import (
    AHEAD,
    CAPACITY,
    COMPUTED,
    IN_FLIGHT,
    LATE,
    LOAD,
    LOWER,
    MEMORY,
    OVERLAP,
    OWN,
    OWN_LOAD,
    OWN_PREFILL,
    OWN_WORK,
    QUEUE,
    STEP,
    UNDONE,
    Counts,
)

SOON: Final = 0.05
"""Seconds of queued prefill below which a rank may get any prompt, so that it does not fall idle while the news of its
progress is on its way to the router. Where a step takes longer, below that: a prompt that comes after a step has begun
misses it, and the step only decodes."""
_SHARE: Final = 0.03
"""Share of a prompt's own prefill seconds that may be queued before it instead, if that is more. Long prompts hardly
notice such a queue, and would be overtaken again and again if they were held until it is gone."""
ENOUGH: Final = 0.35
"""Seconds of prefill that a rank may have queued together, about one step of 8,192 tokens. Short prompts share the
fixed cost of a step; a long one makes all others in its step wait for it (compared in docs/adr/0005-auto-policy.md)."""
_SPARE: Final = 0.05
"""Most of a rank's KV memory that is left free, as a share: requests in flight grow, and their memory is rounded up to
blocks. When it runs out, the engine takes back what it gave the request that came last, which is computed again."""
_AGAIN: Final = 0.5
"""But no more is left free for a request than this share of its prompt, since no more than the prompt may have to be
computed again. Where 130 short prompts fill a rank, 5 % of its memory are room for six more (compared in
docs/adr/0005-auto-policy.md)."""
_SPREAD: Final = 0.1
"""Up to this share of a request's own prefill is added on the rank that computed most within the last minute. New
blocks evict older ones, and in a fleet that is mostly idle nothing else but noise in the learned speeds would tell idle
ranks apart. The busier the fleet, the less is added, since queues then tell ranks apart."""
_STEPS: Final = 1.5
"""Decode steps in a first token's time: half of the step that is under way, on average, and the prefill's own step."""


@inlined
def _memory_wait(taken: int, needed: int, prompt: int, capacity: int, residence: float) -> float:
    """Seconds until enough requests have ended for `needed` tokens to fit into memory, of which `taken` are in use, at
    the mean rate of release."""
    spare = min(_SPARE * capacity, _AGAIN * prompt)
    return max(0.0, needed + spare - capacity) * residence / max(1, taken)


@inlined
def _grown(tokens: int, requests: int, answer: float) -> int:
    """The most tokens that `requests` with `tokens` in all will have at a time, if no others come and each goes on for
    `answer` tokens on average. Where lengths are exponential, R requests of c tokens have R·exp(−t/A)·(c + t) after t
    steps: some have ended, the others have grown. That is the most at t = A − c."""
    mean = tokens / requests
    return tokens if mean >= answer else int(requests * answer * math.exp(mean / answer - 1.0))


@kernel
def memory_waits(taken: Figures, new: Figures, prompt: int, capacity: Figures, residence: float) -> Seconds:
    """`_memory_wait` of a prompt with `new` tokens at each of several ranks."""
    waits = np.zeros(len(taken))
    for at in range(len(taken)):
        waits[at] = _memory_wait(taken[at], taken[at] + new[at], prompt, capacity[at], residence)
    return waits


@inlined
def _crowd(requests: int) -> float:
    """The factor for a batch: its fourth root. Power 1 would be LMetric's product, which accepts too much waiting for
    even batches where prompts share nothing. Power 0 would be the predicted time to first token, which piles requests
    onto the holders of hot prefixes. Of 0, 0.15, 0.25, 0.5 and 1 this was the best over six simulated workloads, by a
    small margin (docs/adr/0005-auto-policy.md)."""
    return math.sqrt(math.sqrt(requests + 1.0))


@inlined
def _lately(estimates: Seconds, at: int) -> float:
    """How much a rank was busy within the last minute. A step's fixed cost there tells how fast it is; the seconds
    computed are those of an average one."""
    return float(estimates[COMPUTED, at] * (estimates[OWN_PREFILL, at] - estimates[OWN_WORK, at]))


@inlined
def _overview(estimates: Seconds, ranks: int) -> tuple[float, float, bool]:
    """Of all ranks: how much they were busy lately, on average; the most seconds that one computed; whether all are
    late."""
    lately, most, all_late = 0.0, 1e-9, True
    for at in range(ranks):
        lately += _lately(estimates, at)
        most = max(most, estimates[COMPUTED, at])
        all_late = all_late and estimates[LATE, at] > 0.0
    return lately / ranks, most, all_late


@inlined
def _weight_on(estimates: Seconds, at: int, mean: float, weight: float) -> float:
    """The weight of a request's own work on a rank: `weight`, and less where the rank was busy for less than the `mean`
    lately, as slow ones are. Its work delays fewer there."""
    return 1.0 + (weight - 1.0) * min(1.0, _lately(estimates, at) / mean) if mean > 0.0 else weight


@inlined
def _seconds(
    counts: Counts, estimates: Seconds, at: int, base: float, work: float, weight: float, load_delay: float
) -> float:
    """The cost as in `auto_costs`, without the wait for memory and without `_SPREAD`, which is not time that anybody
    loses."""
    seconds = estimates[QUEUE, at] + estimates[AHEAD, at] + base + weight * work
    seconds += estimates[LOAD, at] + load_delay * estimates[OWN_LOAD, at] + _STEPS * estimates[STEP, at]
    return float(seconds * _crowd(counts[IN_FLIGHT, at]))


@inlined
def _rent(
    counts: Counts,
    estimates: Seconds,
    values: Seconds,
    may_go: npt.NDArray[np.bool_],
    mean: float,
    weight: float,
    load_delay: float,
) -> tuple[int, int, float]:
    """What the request loses because a prefix has too few copies; see `copies`.

    Returns the position of the cheapest candidate; that of the cheapest one that holds less of the prompt and is ready
    (−1: there is none); and the rent: by how much the best of those that hold less would undercut the cheapest if it
    held as much (0 if it would not, or if the cheapest is not ready).
    """
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
        # A step's fixed cost is part of every prefill: its ratio tells how fast a rank is compared with the cheapest.
        quick = (estimates[OWN_PREFILL, at] - estimates[OWN_WORK, at]) / base if base > 0.0 else 1.0
        weighed = _weight_on(estimates, at, mean, weight)
        best = min(best, _seconds(counts, estimates, at, quick * base, quick * work, weighed, load_delay))
    weighed = _weight_on(estimates, least, mean, weight)
    rent = _seconds(counts, estimates, least, base, work, weighed, load_delay) - best
    return least, other, max(0.0, rent) if other >= 0 else 0.0


@loop
def auto_costs(
    counts: Counts,
    estimates: Seconds,
    prompt: int,
    weight: float,
    load_delay: float,
    residence: float,
    answer: float,
    values: Seconds,
    may_go: npt.NDArray[np.bool_],
) -> tuple[int, int, float]:
    """Into `values`: the cost of each candidate; into `may_go`: whether each is ready for the request. Returns what
    `_rent` does. `answer`: tokens that each request is expected to go on for.

    A rank that has no request from this router is always ready, whatever it reports: otherwise other clients of it
    could keep this router away for ever. If the prefill under way is late on every rank (`figures.LATE`), its lateness
    makes none of them less ready: there is no better one to wait for. On a rank without requests there is no wait for
    memory, since nobody would release any. Where all slots are taken, a rank gets the requests that it will begin
    within `ENOUGH` seconds, so that no slot stays empty until the router hears of it; the others wait in the router,
    where they can go elsewhere.
    """
    mean, most, all_late = _overview(estimates, len(values))
    for at in range(len(values)):
        taken = counts[MEMORY, at]
        new = prompt - (counts[OVERLAP, at] - counts[LOWER, at])
        needed = _grown(taken + new, counts[IN_FLIGHT, at] + 1, answer)
        memory = _memory_wait(taken, needed, prompt, counts[CAPACITY, at], residence) if taken else 0.0
        queue, held = estimates[QUEUE, at], estimates[AHEAD, at]
        own, work = estimates[OWN_PREFILL, at], estimates[OWN_WORK, at]
        loads = estimates[LOAD, at] + load_delay * estimates[OWN_LOAD, at]
        spread = _SPREAD / weight * own * estimates[COMPUTED, at] / most
        weighed = _weight_on(estimates, at, mean, weight) * work
        seconds = queue + held + (own - work) + weighed + spread + loads + _STEPS * estimates[STEP, at]
        values[at] = seconds * _crowd(counts[IN_FLIGHT, at]) + memory
        before = estimates[UNDONE, at] - (estimates[LATE, at] if all_late else 0.0)
        fits = before < max(SOON, _SHARE * own, estimates[STEP, at]) or before + work < ENOUGH
        slot_soon = queue <= max(ENOUGH, estimates[STEP, at], estimates[UNDONE, at])
        ready = fits and slot_soon and memory == 0.0 and held == 0.0
        may_go[at] = ready or counts[OWN, at] == 0
    return _rent(counts, estimates, values, may_go, mean, weight, load_delay)
