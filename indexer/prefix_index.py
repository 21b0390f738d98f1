"""Which (worker, dp_rank) holds which block in which tier, and how much of a prompt each holds.

A block is named by its sequence hash, which stands for the whole prefix up to its end, so one flat map does what a
radix tree would, never splits, merges or leaks nodes, and matching is a walk along the prompt's hashes with a bit mask
of the ranks that still hold everything so far (docs/adr/0001-flat-chained-hashes.md). `indexer.packed` has the map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from indexer.hashing import SequenceHashes, chain_hashes, pack_tokens
from indexer.matches import Matches, Overlap, Positions, SlotMatches
from indexer.packed import MAX_SLOTS, PackedTable, walk_masks
from indexer.types import RankSet, SequenceHash, Tier, WorkerRank

__all__ = ["Matches", "Overlap", "PrefixIndex", "as_hashes", "warm_up"]

_MAX_RANK_SETS = 64
"""Whose slots are remembered; in a fleet that does not change there are as many as there are pools and block sizes."""


class PrefixIndex:
    """A set of (rank, tier, sequence hash): storing twice or removing what is not there changes nothing."""

    def __init__(self) -> None:
        self._slots: dict[WorkerRank, int] = {}
        self._tables = {tier: PackedTable() for tier in Tier}
        self._free = list(range(63, -1, -1))
        self._busy: dict[int, set[Tier]] = {}
        self._live = np.zeros(1, np.uint64)
        self._positions: dict[RankSet, Positions] = {}

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._slots)} ranks, {self.entries()} entries, {self.nbytes / 1e6:.1f} MB>"

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def store(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        slot = self._slot(rank)
        self._set_free(tier, self._tables[tier].store(slot, as_hashes(hashes)))

    def remove(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        slot = self._slots.get(rank)
        if slot is not None:
            self._set_free(tier, self._tables[tier].remove(slot, as_hashes(hashes)))

    def clear(self, rank: WorkerRank) -> None:
        """Forget all that `rank` holds, and the rank itself; its slot serves another when its blocks are swept out."""
        slot = self._slots.pop(rank, None)
        if slot is None:
            return
        self._positions.clear()
        self._live[slot >> 6] &= ~np.uint64(1 << (slot & 63))
        holding = {tier for tier, table in self._tables.items() if table.count(slot)}
        if not holding:
            self._free.append(slot)
            return
        self._busy[slot] = holding
        for tier in holding:
            self._tables[tier].condemn(slot)

    def find_matches(self, hashes: SequenceHashes | Sequence[SequenceHash]) -> Matches:
        """Of `hashes`, a prompt's sequence hashes in order."""
        hashes = as_hashes(hashes)
        gpu = self._tables[Tier.GPU]
        depths = np.zeros(64 * gpu.words + 1, np.int32)
        gpu.walk(self._live, hashes, depths)
        lower = [table for tier, table in self._tables.items() if tier is not Tier.GPU and len(table)]
        if not lower:
            return SlotMatches(self, depths, depths)
        holders = np.zeros((len(hashes), gpu.words), np.uint64)
        for table in (gpu, *lower):
            table.mark(hashes, holders)
        anywhere = np.zeros_like(depths)
        walk_masks(self._live, holders, anywhere)
        return SlotMatches(self, anywhere, depths)

    def slots(self) -> Mapping[WorkerRank, int]:
        """Where `SlotMatches` finds each rank that holds anything, or did."""
        return self._slots

    def positions(self, ranks: RankSet) -> Positions:
        """Slots of `ranks` in order, −1 for one that has none; remembered until any rank gains or loses its slot."""
        found = self._positions.get(ranks)
        if found is None:
            if len(self._positions) >= _MAX_RANK_SETS:
                self._positions.clear()
            found = self._positions[ranks] = np.array([self._slots.get(rank, -1) for rank in ranks.ranks], np.intp)
        return found

    def blocks(self, rank: WorkerRank, tier: Tier) -> int:
        """How many blocks `rank` holds in `tier`."""
        slot = self._slots.get(rank)
        return 0 if slot is None else self._tables[tier].count(slot)

    def blocks_of(self, rank: WorkerRank) -> dict[str, int]:
        """Blocks held, by tier."""
        return {tier.name.lower(): self.blocks(rank, tier) for tier in Tier}

    def entries(self) -> int:
        """How many (rank, tier, block) are stored."""
        return sum(self.blocks(rank, tier) for rank in self._slots for tier in Tier)

    def dump(self) -> dict[tuple[WorkerRank, Tier], set[SequenceHash]]:
        """Everything, for comparison in tests and by hand."""
        ranks = {slot: rank for rank, slot in self._slots.items()}
        found: dict[tuple[WorkerRank, Tier], set[SequenceHash]] = {(r, t): set() for r in self._slots for t in Tier}
        for tier, table in self._tables.items():
            for block, slots in table.items():
                for slot in slots:
                    if slot in ranks:
                        found[ranks[slot], tier].add(block)
        return found

    def _slot(self, rank: WorkerRank) -> int:
        slot = self._slots.get(rank)
        if slot is None:
            if not self._free:
                self._widen()
            slot = self._slots[rank] = self._free.pop()
            self._positions.clear()
            self._live[slot >> 6] |= np.uint64(1 << (slot & 63))
        return slot

    def _widen(self) -> None:
        words = len(self._live)
        if 64 * 2 * words > MAX_SLOTS:
            raise OverflowError(f"more than {MAX_SLOTS} ranks")
        for table in self._tables.values():
            table.widen(2 * words)
        self._live = np.pad(self._live, (0, words))
        self._free += range(64 * 2 * words - 1, 64 * words - 1, -1)

    def _set_free(self, tier: Tier, slots: set[int]) -> None:
        for slot in slots:
            self._busy[slot].discard(tier)
            if not self._busy[slot]:
                del self._busy[slot]
                self._free.append(slot)


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after. Not on a request's way."""
    index = PrefixIndex()
    for tier in (Tier.GPU, Tier.CPU):
        hashes = chain_hashes(pack_tokens([0, 1]), 1, 0)
        index.store(WorkerRank("", 0), tier, hashes)
        index.find_matches(hashes)
        index.remove(WorkerRank("", 0), tier, hashes[:1])


def as_hashes(hashes: SequenceHashes | Sequence[SequenceHash]) -> SequenceHashes:
    return hashes if isinstance(hashes, np.ndarray) else np.array(hashes, np.uint64)
