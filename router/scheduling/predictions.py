"""What is predicted of each candidate: what it holds, and how long it will take; compiled loops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from indexer.jit import kernel
from indexer.matches import Overlaps
from router.scheduling.decision import Figures, Seconds


@kernel
def held_tokens(
    blocks: Overlaps, gpu_blocks: Overlaps, sizes: Figures, usable: int, lower_tier: float
) -> tuple[Figures, Seconds, int]:
    """Tokens of each candidate's blocks, `usable` at most; the same, those below the GPU weighed; the most of the
    former. `sizes`: tokens in a block."""
    held, credit, best = np.zeros(len(blocks), np.int64), np.zeros(len(blocks)), 0
    for at in range(len(blocks)):
        size = sizes[at]
        most = usable // size * size
        held[at] = min(blocks[at] * size, most)
        gpu = min(gpu_blocks[at] * size, most)
        credit[at] = gpu + lower_tier * (held[at] - gpu)
        best = max(best, held[at])
    return held, credit, best


@kernel
def prefill_seconds(
    known: Seconds,
    places: npt.NDArray[np.intp],
    base: float,
    per_token: float,
    per_pair: float,
    held: Seconds,
    prompt: int,
) -> Seconds:
    """Of a prompt of which each candidate has `held` tokens; `known`: factors, by place."""
    seconds = np.zeros(len(places))
    for at in range(len(places)):
        new = max(0.0, prompt - held[at])
        seconds[at] = known[places[at]] * (base + new * (per_token + per_pair * (prompt - new / 2)))
    return seconds


@kernel
def step_seconds(
    known: Seconds,
    places: npt.NDArray[np.intp],
    base: float,
    per_sequence: float,
    per_token: float,
    requests: Figures,
    active: Figures,
    prompt: int,
) -> Seconds:
    """Between two tokens of a stream, with one more of `prompt` tokens beside so many that have `active` in all."""
    seconds = np.zeros(len(places))
    for at in range(len(places)):
        work = base + per_sequence * (requests[at] + 1) + per_token * (active[at] + prompt)
        seconds[at] = known[places[at]] * work
    return seconds
