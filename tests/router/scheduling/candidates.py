"""Candidates, what is known of them, and randomness, made for a test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import settings

from indexer.hashing import SequenceHashes
from indexer.matches import Overlap, SlotMatches
from indexer.types import RankSet, SequenceHash, WorkerRank
from router.scheduling.candidates import Candidates, Costs, Figures, Seconds
from router.scheduling.decision import UNBOUNDED, Choice

repeatable = settings(derandomize=True, deadline=None)
"""The same examples in every run, however slow the machine."""

ALMOST_ONE = 1 - 2**-53
"""The greatest value that `random()` can return."""


class Scripted:
    """Returns the given values in turn; more calls than values is an error."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = list(values)

    def random(self) -> float:
        return self._values.pop(0)

    @property
    def left(self) -> int:
        return len(self._values)


def rank(name: str, dp_rank: int = 0) -> WorkerRank:
    return WorkerRank(name, dp_rank)


def named(names: Iterable[str], block_size: int = 16) -> Candidates:
    """Candidates in the order of their names, as they always are."""
    return Candidates((rank(name), block_size) for name in sorted(names))


@dataclass(frozen=True)
class Plain:
    """A `decision.Situation` of which everything is known beforehand."""

    candidates: Candidates
    prompt_tokens: int
    requests: Figures
    own_requests: Figures
    prefill_tokens: Figures
    active_tokens: Figures
    overlap_tokens: Figures
    credit_tokens: Figures | Costs
    stored_tokens: Figures
    lower_tokens: Figures
    memory_tokens: Figures
    capacity_tokens: Figures
    queue_seconds: Seconds
    undone_seconds: Seconds
    late_seconds: Seconds
    computed_seconds: Seconds
    held_seconds: Seconds
    prefill_seconds: Seconds
    work_seconds: Seconds
    load_seconds: Seconds
    own_load_seconds: Seconds
    whole_prefill_seconds: float
    step_seconds: Seconds
    residence_seconds: float = 10.0
    busy: float = 0.0
    loading: float = 0.0
    now: float = 0.0
    prefix: SequenceHash | None = None
    """Of whatever any of them holds."""
    limit: float = math.inf
    held_requests: float = 0.0
    answer_tokens: float = 0.0

    def prefix_of(self, position: int) -> SequenceHash | None:
        return self.prefix if self.overlap_tokens[position] else None

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.array(
            [
                self.requests,
                self.prefill_tokens,
                self.active_tokens,
                self.own_requests,
                self.memory_tokens,
                self.capacity_tokens,
                [UNBOUNDED] * len(self.candidates),
                self.overlap_tokens,
                self.stored_tokens,
                self.lower_tokens,
                [0] * len(self.candidates),
            ],
            np.int64,
        )

    @property
    def estimates(self) -> Seconds:
        return np.array(
            [
                self.credit_tokens,
                self.queue_seconds,
                self.undone_seconds,
                self.prefill_seconds,
                self.work_seconds,
                self.step_seconds,
                self.computed_seconds,
                self.late_seconds,
                self.held_seconds,
                self.load_seconds,
                self.own_load_seconds,
            ],
            np.float64,
        )


def situation(
    candidates: Candidates,
    prompt: int = 10,
    *,
    requests: Sequence[int] = (),
    own: Sequence[int] | None = None,
    pending: Sequence[int] = (),
    active: Sequence[int] = (),
    overlap: Sequence[int] = (),
    credit: Sequence[float] | None = None,
    lower: Sequence[int] = (),
    memory: Sequence[int] = (),
    capacity: Sequence[int] = (),
    queue: Sequence[float] = (),
    undone: Sequence[float] = (),
    late: Sequence[float] = (),
    computed: Sequence[float] = (),
    held: Sequence[float] = (),
    prefill: Sequence[float] = (),
    work: Sequence[float] | None = None,
    load: Sequence[float] = (),
    own_load: Sequence[float] = (),
    whole: Sequence[float] = (),
    step: Sequence[float] = (),
    residence: float = 10.0,
    busy: float = 0.0,
    loading: float = 0.0,
    now: float = 0.0,
    prefix: SequenceHash | None = None,
    limit: float = math.inf,
    held_requests: float = 0.0,
    answer: float = 0.0,
) -> Plain:
    """Numbers in the order of the candidates; none: 0 each, or as `requests`, `active`, `overlap`
    `queue` and `prefill` say for `own`, `memory`, `credit`, `undone`, `work` and `whole`."""

    def figures(numbers: Sequence[int], otherwise: int = 0) -> Figures:
        return np.array(numbers or [otherwise] * len(candidates), np.int64)

    def seconds(numbers: Sequence[float]) -> Seconds:
        return np.array(numbers or [0.0] * len(candidates), np.float64)

    return Plain(
        candidates,
        prompt,
        figures(requests),
        figures(requests if own is None else own),
        figures(pending),
        figures(active),
        figures(overlap),
        figures(overlap) if credit is None else np.array(credit),
        figures(()),
        figures(lower),
        figures(memory or active),
        figures(capacity, UNBOUNDED),
        seconds(queue),
        seconds(undone or queue),
        seconds(late),
        seconds(computed),
        seconds(held),
        seconds(prefill),
        seconds(prefill if work is None else work),
        seconds(load),
        seconds(own_load),
        float(np.mean(whole or prefill or [0.0])),
        seconds(step),
        residence,
        busy,
        loading,
        now,
        prefix,
        limit,
        held_requests,
        answer,
    )


def with_requests(counts: Sequence[int]) -> Plain:
    """One candidate for each count of requests in flight, named a, b, c …"""
    return situation(named(chr(ord("a") + index) for index in range(len(counts))), requests=counts)


def costs_of(choice: Choice) -> list[float]:
    assert choice.costs is not None
    return list(choice.costs.tolist())


class _Slots:
    """`indexer.matches.Places` in the order given; behind the last is one that holds nothing, for everybody else."""

    def __init__(self, ranks: Iterable[WorkerRank]) -> None:
        self._slots = {each: slot for slot, each in enumerate(ranks)}

    def slots(self) -> Mapping[WorkerRank, int]:
        return self._slots

    def positions(self, ranks: RankSet) -> npt.NDArray[np.intp]:
        return np.array([self._slots.get(each, -1) for each in ranks.ranks], np.intp)


def holding(overlaps: Mapping[WorkerRank, Overlap], on_disk: int = 0) -> SlotMatches:
    """What each rank holds of a prompt; of what is not on its GPU, the last `on_disk` blocks are on its disk."""
    blocks, gpu_blocks = np.array([*overlaps.values(), Overlap(0, 0)], np.int32).T.copy()
    cpu_blocks = np.maximum(gpu_blocks, blocks - on_disk) if on_disk else blocks
    return SlotMatches(_Slots(overlaps), blocks, cpu_blocks, gpu_blocks, _hashes(blocks))


def holding_on_gpu(held: Mapping[WorkerRank, int]) -> SlotMatches:
    """The same where there is no lower tier: one array tells both, as `Matches` says."""
    blocks = np.array([*held.values(), 0], np.int32)
    return SlotMatches(_Slots(held), blocks, blocks, blocks, _hashes(blocks))


def _hashes(blocks: npt.NDArray[np.int32]) -> SequenceHashes:
    return np.arange(1_001, 1_001 + blocks.max(), dtype=np.uint64)


def chi_square(observed: Sequence[int], shares: Sequence[float]) -> float:
    """How far counts are from what `shares` (which sum to 1) make likely. Below 35 for up to ten counts, but for one
    time in ten thousand; seeds are fixed, so a test that passes once always passes.
    """
    total = sum(observed)
    return sum((seen - total * share) ** 2 / (total * share) for seen, share in zip(observed, shares, strict=True))
