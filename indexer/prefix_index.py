"""Which (worker, dp_rank) holds which block in which tier, and how much of a prompt each holds.

A block is named by its sequence hash, which stands for the whole prefix up to its end, so one flat map does what a
radix tree would, never splits, merges or leaks nodes, and matching is a walk along the prompt's hashes with a bit mask
of the ranks that still hold everything so far (docs/adr/0001-flat-chained-hashes.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from indexer.types import SequenceHash, Tier, WorkerRank


class Overlap(NamedTuple):
    """Leading blocks of a prompt that a rank holds: in any tier, and how many of those without a break on the GPU."""

    blocks: int
    gpu_blocks: int


class PrefixIndex:
    """A set of (rank, tier, sequence hash): storing twice or removing what is not there changes nothing."""

    def __init__(self) -> None:
        self._slots: dict[WorkerRank, int] = {}
        self._ranks: dict[int, WorkerRank] = {}
        self._holders: tuple[dict[SequenceHash, int], ...] = tuple({} for _ in Tier)
        self._counts: dict[tuple[WorkerRank, Tier], int] = {}

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._slots)} ranks, {sum(self._counts.values())} entries>"

    def store(self, rank: WorkerRank, tier: Tier, hashes: Iterable[SequenceHash]) -> None:
        bit = 1 << self._slot(rank)
        holders = self._holders[tier]
        added = 0
        for block in hashes:
            mask = holders.get(block, 0)
            if not mask & bit:
                holders[block] = mask | bit
                added += 1
        self._counts[rank, tier] = self._counts.get((rank, tier), 0) + added

    def remove(self, rank: WorkerRank, tier: Tier, hashes: Iterable[SequenceHash]) -> None:
        slot = self._slots.get(rank)
        if slot is None:
            return
        bit = 1 << slot
        holders = self._holders[tier]
        removed = 0
        for block in hashes:
            mask = holders.get(block, 0)
            if mask & bit:
                _set_mask(holders, block, mask ^ bit)
                removed += 1
        self._counts[rank, tier] = self._counts.get((rank, tier), 0) - removed

    def clear(self, rank: WorkerRank) -> None:
        """Forget all that `rank` holds, and the rank itself; its slot may serve another."""
        slot = self._slots.pop(rank, None)
        if slot is None:
            return
        del self._ranks[slot]
        for tier in Tier:
            if self._counts.pop((rank, tier), 0):
                self._clear_bit(self._holders[tier], 1 << slot)

    @staticmethod
    def _clear_bit(holders: dict[SequenceHash, int], bit: int) -> None:
        for block in [block for block, mask in holders.items() if mask & bit]:
            _set_mask(holders, block, holders[block] ^ bit)

    def find_matches(self, hashes: Sequence[SequenceHash]) -> dict[WorkerRank, Overlap]:
        """Overlap of every rank that holds at least the first of `hashes`, a prompt's sequence hashes in order."""
        gpu = self._holders[Tier.GPU]
        on_gpu = self._walk(hashes, [gpu])
        lower = [holders for holders in self._holders[Tier.CPU :] if holders]
        anywhere = self._walk(hashes, [gpu, *lower]) if lower else on_gpu
        return {self._ranks[slot]: Overlap(blocks, on_gpu.get(slot, 0)) for slot, blocks in anywhere.items()}

    @staticmethod
    def _walk(hashes: Sequence[SequenceHash], maps: list[dict[SequenceHash, int]]) -> dict[int, int]:
        """Slot → number of leading hashes that it holds in any of `maps`; slots that hold none are left out."""
        matched: dict[int, int] = {}
        alive = -1
        depth = 0
        for depth, block in enumerate(hashes):
            holding = 0
            for holders in maps:
                holding |= holders.get(block, 0)
            still = alive & holding
            if still != alive:
                if depth:
                    _note(matched, alive & ~still, depth)
                alive = still
                if not alive:
                    return matched
        if alive > 0:
            _note(matched, alive, depth + 1)
        return matched

    def blocks(self, rank: WorkerRank, tier: Tier) -> int:
        """How many blocks `rank` holds in `tier`."""
        return self._counts.get((rank, tier), 0)

    def blocks_of(self, rank: WorkerRank) -> dict[str, int]:
        """Blocks held, by tier."""
        return {tier.name.lower(): self.blocks(rank, tier) for tier in Tier}

    def entries(self) -> int:
        """How many (rank, tier, block) are stored."""
        return sum(self._counts.values())

    def dump(self) -> dict[tuple[WorkerRank, Tier], set[SequenceHash]]:
        """Everything, for comparison in tests and by hand. O(entries × ranks)."""
        return {
            (rank, tier): {block for block, mask in self._holders[tier].items() if mask >> slot & 1}
            for rank, slot in self._slots.items()
            for tier in Tier
        }

    def _slot(self, rank: WorkerRank) -> int:
        slot = self._slots.get(rank)
        if slot is None:
            slot = next(free for free in range(len(self._ranks) + 1) if free not in self._ranks)
            self._slots[rank] = slot
            self._ranks[slot] = rank
        return slot


def _set_mask(holders: dict[SequenceHash, int], block: SequenceHash, mask: int) -> None:
    if mask:
        holders[block] = mask
    else:
        del holders[block]


def _note(matched: dict[int, int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        matched[low.bit_length() - 1] = depth
        mask ^= low
