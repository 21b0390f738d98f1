"""The answer to a look-up, how much of a prompt each rank holds: as arrays for the scheduler, a mapping for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
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
    """Leading blocks of a prompt that a rank holds: in any tier, and how many of those without a break on the GPU."""

    blocks: int
    gpu_blocks: int


_overlap = partial(tuple.__new__, Overlap)  # half the time of calling it


class Prefix(NamedTuple):
    """Leading blocks of a prompt."""

    blocks: int
    sequence_hash: SequenceHash
    """Of the last, which stands for all before it."""


class Places(Protocol):
    """Who knows where in `Depths` a rank is."""

    def slots(self) -> Mapping[WorkerRank, int]: ...
    def positions(self, ranks: RankSet) -> Positions: ...


class Matches(Mapping[WorkerRank, Overlap], ABC):
    """Overlap of every rank that holds at least a prompt's first block; valid until the index changes."""

    @abstractmethod
    def blocks_of(self, ranks: RankSet) -> Overlaps:
        """Leading blocks that each of `ranks` holds in any tier. May be shared: do not write to it."""

    @abstractmethod
    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        """Those of `blocks_of` that are on the GPU without a break; the same array where there is no other tier."""

    def known_blocks_of(self, ranks: RankSet) -> Overlaps:
        """Those of `blocks_of` that nobody had to predict."""
        return self.blocks_of(ranks)

    @abstractmethod
    def prefix_of(self, rank: WorkerRank) -> Prefix | None:
        """Of the prompt, what `rank` holds in any tier; None where that is nothing."""


class SlotMatches(Matches):
    """Of one chain. Arrays cost a microsecond; the mapping is made as a whole when it is first used."""

    def __init__(self, places: Places, blocks: Depths, gpu_blocks: Depths, hashes: SequenceHashes) -> None:
        """`hashes`: those that were looked up."""
        self._places = places
        self._hashes = hashes
        self._blocks = blocks
        self._gpu_blocks = gpu_blocks
        self._last: tuple[RankSet, Overlaps] | None = None
        self._mapping: dict[WorkerRank, Overlap] | None = None

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        if self._last is None or self._last[0] is not ranks:
            self._last = ranks, self._blocks[self._places.positions(ranks)]
        return self._last[1]

    def gpu_blocks_of(self, ranks: RankSet) -> Overlaps:
        if self._gpu_blocks is self._blocks:
            return self.blocks_of(ranks)
        return self._gpu_blocks[self._places.positions(ranks)]

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

    def items(self) -> ItemsView[WorkerRank, Overlap]:
        return self._all().items()

    def values(self) -> ValuesView[Overlap]:
        return self._all().values()

    def _all(self) -> dict[WorkerRank, Overlap]:
        if self._mapping is None:
            slots = self._places.slots()
            at = np.fromiter(slots.values(), np.intp, len(slots))
            pairs = zip(self._blocks[at].tolist(), self._gpu_blocks[at].tolist(), strict=True)
            found = zip(slots, map(_overlap, pairs), strict=True)
            self._mapping = {rank: overlap for rank, overlap in found if overlap[0]}
        return self._mapping


class SumOfMatches(Matches):
    """Of a fleet with several block sizes: a rank holds blocks of one size only, so its overlap is in one part."""

    def __init__(self, parts: Sequence[Matches]) -> None:
        self._parts = parts

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        return _sum([part.blocks_of(ranks) for part in self._parts], len(ranks))

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
    """What is known and what is predicted of the same ranks, whichever is more."""

    def __init__(self, known: Matches, predicted: Sequence[Matches]) -> None:
        self._known = known
        self._predicted = predicted
        self._last: tuple[RankSet, Overlaps, Overlaps] | None = None
        """An answer of `known`, and what it came to with what is predicted: both questions often have the same one."""

    def blocks_of(self, ranks: RankSet) -> Overlaps:
        return self._most(self._known.blocks_of(ranks), ranks)

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
