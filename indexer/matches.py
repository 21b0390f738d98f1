"""The result of a look-up, how much of a prompt each rank holds: arrays for the scheduler, a mapping for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.hashing import SequenceHashes
from indexer.kernels import Depths
from indexer.types import RankSet, SequenceHash, WorkerRank

Overlaps: TypeAlias = npt.NDArray[np.int32]
"""Blocks by rank, in the order of a `RankSet`."""
Positions: TypeAlias = npt.NDArray[np.intp]


class Overlap(NamedTuple):
    """Leading blocks of a prompt that a rank holds in any tier, and how many of these are on the GPU without a gap."""

    blocks: int
    gpu_blocks: int


_overlap = partial(tuple.__new__, Overlap)  # takes half the time of the constructor


class Prefix(NamedTuple):
    """Leading blocks of a prompt."""

    blocks: int
    sequence_hash: SequenceHash
    """Of the last block; it stands for the whole prefix."""


class Places(Protocol):
    """Knows the position of each rank in `Depths`."""

    def slots(self) -> Mapping[WorkerRank, int]: ...
    def positions(self, ranks: RankSet) -> Positions: ...


class Matches(Mapping[WorkerRank, Overlap], ABC):
    """Overlap of every rank that holds at least a prompt's first block; valid until the index changes."""

    @abstractmethod
    def blocks_of(self, ranks: RankSet) -> Overlaps:
        """Leading blocks that each of `ranks` holds in any tier. The array may be shared: do not write to it."""

    @abstractmethod
    def cpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        """Leading blocks on the GPU or in CPU memory without a gap; the same array as `blocks_of` where nothing is on
        disk."""

    @abstractmethod
    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        """Leading blocks on the GPU without a gap; the same array as `blocks_of` where there is no other tier."""

    def known_blocks_of(self, ranks: RankSet) -> Overlaps:
        """`blocks_of` without predicted blocks."""
        return self.blocks_of(ranks)

    @abstractmethod
    def prefix_of(self, rank: WorkerRank) -> Prefix | None:
        """The prompt's prefix that `rank` holds in any tier; None if it holds nothing."""


class SlotMatches(Matches):
    """Matches of one chain. Arrays cost a microsecond; the mapping is made when it is first used."""

    def __init__(
        self, places: Places, blocks: Depths, cpu_blocks: Depths, gpu_blocks: Depths, hashes: SequenceHashes
    ) -> None:
        """`hashes`: the chain that was looked up."""
        self._places = places
        self._hashes = hashes
        self._blocks = blocks
        self._cpu_blocks = cpu_blocks
        self._gpu_blocks = gpu_blocks
        self._last: tuple[RankSet, Overlaps] | None = None
        self._mapping: dict[WorkerRank, Overlap] | None = None

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        if self._last is None or self._last[0] is not ranks:
            self._last = ranks, self._blocks[self._places.positions(ranks)]
        return self._last[1]

    def cpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._of(self._cpu_blocks, ranks)

    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._of(self._gpu_blocks, ranks)

    def _of(self, depths: Depths, ranks: RankSet) -> Overlaps:
        return self.blocks_of(ranks) if depths is self._blocks else depths[self._places.positions(ranks)]

    def prefix_of(self, rank: WorkerRank) -> Prefix | None:
        slot = self._places.slots().get(rank)
        blocks = 0 if slot is None else int(self._blocks[slot])
        return Prefix(blocks, int(self._hashes[blocks - 1])) if blocks else None

    def __getitem__(self, rank: WorkerRank) -> Overlap:
        return self._all()[rank]

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[WorkerRank, Overlap]:
        if self._mapping is None:
            slots = self._places.slots()
            at = np.fromiter(slots.values(), np.intp, len(slots))
            pairs = zip(self._blocks[at].tolist(), self._gpu_blocks[at].tolist(), strict=True)
            found = zip(slots, map(_overlap, pairs), strict=True)
            self._mapping = {rank: overlap for rank, overlap in found if overlap[0]}
        return self._mapping


class SumOfMatches(Matches):
    """Matches in a fleet with several block sizes. A rank has one block size, so its overlap is in one part."""

    def __init__(self, parts: Sequence[Matches]) -> None:
        self._parts = parts

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        return _sum([part.blocks_of(ranks) for part in self._parts], len(ranks))

    def cpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return _sum([part.cpu_blocks_of(ranks) for part in self._parts], len(ranks))

    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return _sum([part.gpu_blocks_of(ranks) for part in self._parts], len(ranks))

    def known_blocks_of(self, ranks: RankSet) -> Overlaps:
        return _sum([part.known_blocks_of(ranks) for part in self._parts], len(ranks))

    def prefix_of(self, rank: WorkerRank) -> Prefix | None:
        return next((found for part in self._parts if (found := part.prefix_of(rank))), None)

    def __getitem__(self, rank: WorkerRank) -> Overlap:
        for part in self._parts:
            if rank in part:
                return part[rank]
        raise KeyError(rank)

    def __iter__(self) -> Iterator[WorkerRank]:
        return (rank for part in self._parts for rank in part)

    def __len__(self) -> int:
        return sum(map(len, self._parts))


class MostOfMatches(Matches):
    """The longer of the known and the predicted overlap of each rank."""

    def __init__(self, known: Matches, predicted: Sequence[Matches]) -> None:
        self._known = known
        self._predicted = predicted
        self._last: tuple[RankSet, Overlaps, Overlaps] | None = None
        """The latest result: the overlaps in all tiers and in some are often the same."""

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._most(self._known.blocks_of(ranks), ranks)

    def cpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._most(self._known.cpu_blocks_of(ranks), ranks)

    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._most(self._known.gpu_blocks_of(ranks), ranks)

    def _most(self, known: Overlaps, ranks: RankSet) -> Overlaps:
        if self._last is None or self._last[0] is not ranks or self._last[1] is not known:
            most = known
            for part in self._predicted:
                most = np.maximum(most, part.blocks_of(ranks))
            self._last = ranks, known, most
        return self._last[2]

    def known_blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._known.known_blocks_of(ranks)

    def prefix_of(self, rank: WorkerRank) -> Prefix | None:
        found = [one for part in (self._known, *self._predicted) if (one := part.prefix_of(rank))]
        return max(found, default=None)

    def __getitem__(self, rank: WorkerRank) -> Overlap:
        found = [part[rank] for part in (self._known, *self._predicted) if rank in part]
        if not found:
            raise KeyError(rank)
        return Overlap(max(one.blocks for one in found), max(one.gpu_blocks for one in found))

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(dict.fromkeys(rank for part in (self._known, *self._predicted) for rank in part))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _sum(parts: list[Overlaps], ranks: int) -> Overlaps:
    total = np.zeros(ranks, np.int32)
    for part in parts:
        total += part
    return total
