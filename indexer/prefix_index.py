"""Which (worker, dp_rank) holds which block in which tier, and how much of a prompt each holds.

A block is named by its sequence hash, which stands for the whole prefix up to its end. So one flat map does the work of
a radix tree, without nodes to split, merge or leak. Matching walks along the prompt's hashes with a bit mask of the
ranks that hold everything so far (docs/adr/0001-flat-chained-hashes.md). `indexer.packed` has the map, and decides what
is evicted where memory is limited. A limited index knows less than the ranks hold, never more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from indexer.hashing import SequenceHashes, chain_hashes, pack_tokens
from indexer.kernels import MAX_SLOTS, NO_SECRET, SLOT_ROWS, Depths, Rows, go_back, walk_masks
from indexer.matches import Matches, Positions, SlotMatches
from indexer.packed import PackedTable
from indexer.types import RankSet, SequenceHash, Tier, WorkerRank

LEAST_BYTES = 1 << 16
"""Least memory of an index for each 64 ranks."""
_INT32: Final = np.dtype(np.int32)
"""Made once: half the time of naming the type in each call."""
_MAX_RANK_SETS: Final = 64
"""Rank sets whose slots are remembered. A fleet that does not change has one per pool and block size."""
_MOST_WINDOWS: Final = 8
"""Most different window sizes in a fleet. Ranks with others count as holding nothing."""


class PrefixIndex:
    """A set of (rank, tier, sequence hash): storing twice, or removing what is not there, changes nothing."""

    def __init__(self, max_bytes: int | None = None, secret: int = NO_SECRET) -> None:
        """`max_bytes`: for everything that grows with the content. ValueError if it is less than an empty index
        needs. `secret`: from 0 to 2^63 − 1, on which it depends where a block is found; who knows it can make look-ups
        slow."""
        if max_bytes is not None and max_bytes < LEAST_BYTES:
            raise ValueError(f"at least {LEAST_BYTES} bytes are needed")
        self._max_bytes = max_bytes
        self._secret = secret
        self._slots: dict[WorkerRank, int] = {}
        self._tables = self._empty_tables()
        """By tier; and by `-window`, what layers with that window hold in any."""
        self._bound: dict[int, set[int]] = {}
        """By window, the slots of ranks with such layers."""
        self._free = list(range(63, -1, -1))
        self._busy: dict[int, set[int]] = {}
        self._live_slots = np.zeros((SLOT_ROWS, 1), np.uint64)
        self._positions: dict[RankSet, Positions] = {}
        self._evicted = self._refused = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._slots)} ranks, {self.entries()} entries, {self.nbytes / 1e6:.1f} MB>"

    @property
    def nbytes(self) -> int:
        """Never more than `max_bytes`, at no moment."""
        return sum(table.nbytes for table in self._tables.values())

    @property
    def evicted(self) -> int:
        """How many (rank, tier, block) were dropped for want of memory, since the start."""
        return self._evicted + sum(table.evicted for table in self._tables.values())

    @property
    def refused(self) -> int:
        """How many (rank, tier, block) were not taken in for want of memory, since the start."""
        return self._refused + sum(table.refused for table in self._tables.values())

    def store(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes | Sequence[SequenceHash]) -> int:
        """Returns how many of the blocks no rank held in that tier before, as far as this index knows."""
        slot = self._slot(rank)
        if slot is None:
            self._refuse(len(hashes))
            return 0
        return self._store(slot, tier, hashes)

    def remove(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        self._remove(rank, tier, hashes)

    def store_window(self, rank: WorkerRank, window: int, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        """`rank` has layers that look back over `window` > 0 blocks only, and these hold the blocks too, in any tier.
        From now on its overlap only ends where these layers hold that many blocks before, or all."""
        slot = self._slot(rank)
        if slot is None:
            self._refuse(len(hashes))
            return
        self._bound.setdefault(window, set()).add(slot)
        if -window in self._tables or self._add_table(window):
            self._store(slot, -window, hashes)
        else:
            self._refused += len(hashes)

    def remove_window(self, rank: WorkerRank, window: int, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        self._remove(rank, -window, hashes)

    def windows(self, rank: WorkerRank) -> list[int]:
        """Windows that `rank` has reported since it was cleared."""
        slot = self._slots.get(rank) if self._bound else None
        return [window for window, bound in self._bound.items() if slot in bound]

    def clear(self, rank: WorkerRank) -> None:
        """Forget all that `rank` holds, and the rank itself. Its slot is reused when its blocks are swept out."""
        slot = self._slots.pop(rank, None)
        if slot is None:
            return
        self._positions.clear()
        self._live_slots[0, slot >> 6] &= ~np.uint64(1 << (slot & 63))
        for bound in self._bound.values():
            bound.discard(slot)
        self._bound = {window: bound for window, bound in self._bound.items() if bound}
        holding = {part for part, table in self._tables.items() if table.count(slot)}
        if holding:
            self._busy[slot] = holding
        else:
            self._free.append(slot)
        for part, table in list(self._tables.items()):
            if not table.is_held_beside(slot):
                self._begin_anew(part)
            elif part in holding:
                table.condemn(slot)

    def find_matches(self, hashes: SequenceHashes | Sequence[SequenceHash]) -> Matches:
        """The matches of `hashes`, a prompt's sequence hashes in order."""
        hashes = as_hashes(hashes)
        gpu = cpu = disk = self._walk(hashes)[0]
        in_cpu, on_disk = len(self._tables[Tier.CPU]) > 0, len(self._tables[Tier.DISK]) > 0
        if in_cpu or on_disk:
            holders = np.zeros((len(hashes), self._live_slots.shape[1]), np.uint64)
            self._tables[Tier.GPU].mark(hashes, holders)
            if in_cpu:
                cpu = disk = self._walk_lower(Tier.CPU, hashes, holders)
            if on_disk:
                disk = self._walk_lower(Tier.DISK, hashes, holders)
        return SlotMatches(self, disk, cpu, gpu, hashes)

    def _walk_lower(self, tier: Tier, hashes: SequenceHashes, holders: Rows) -> Depths:
        """Leading blocks that each slot holds in `tier` or above; `holders` are those above, and get those of the
        tier."""
        self._tables[tier].mark(hashes, holders)
        depths = np.zeros(64 * self._live_slots.shape[1] + 1, _INT32)
        walk_masks(self._live_slots, holders, depths)
        if self._bound:
            deepest = int(depths.max())
            self._go_back(hashes[:deepest], depths)
        return depths

    def find_on_gpu(self, hashes: SequenceHashes) -> Matches | None:
        """The matches on the GPU alone; None if no rank holds the first block."""
        depths, deepest = self._walk(hashes)
        return SlotMatches(self, depths, depths, depths, hashes) if deepest else None

    def _walk(self, hashes: SequenceHashes) -> tuple[Depths, int]:
        """Leading blocks that each slot holds on the GPU, and the most of any slot."""
        gpu = self._tables[Tier.GPU]
        depths = np.zeros(64 * gpu.words + 1, _INT32)
        deepest = gpu.walk(self._live_slots, hashes, depths)
        return depths, self._go_back(hashes[:deepest], depths) if self._bound and deepest else deepest

    def _go_back(self, hashes: SequenceHashes, depths: Depths) -> int:
        """Shorten the depths of ranks with windows to where all their layers can continue. Shortening for one window
        may make another fail, so it is repeated."""
        windows = [
            (window, self._marked(window, hashes), np.fromiter(bound, np.int64, len(bound)))
            for window, bound in self._bound.items()
        ]
        shortened = True
        while shortened:
            shortened = False
            for window, masks, bound in windows:
                shortened |= go_back(masks, bound, window, depths)
            shortened &= len(windows) > 1
        return int(depths.max())

    def _marked(self, window: int, hashes: SequenceHashes) -> Rows:
        masks = np.zeros((len(hashes), self._live_slots.shape[1]), np.uint64)
        table = self._tables.get(-window)
        if table is not None:
            table.mark(hashes, masks)
        return masks

    def slots(self) -> Mapping[WorkerRank, int]:
        """The position in `SlotMatches` of each rank that holds anything, or did."""
        return self._slots

    def positions(self, ranks: RankSet) -> Positions:
        """Slots of `ranks` in order, −1 for a rank without one. Remembered until any rank gains or loses its slot."""
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

    def blocks_by_tier(self, rank: WorkerRank) -> dict[Tier, int]:
        return {tier: self.blocks(rank, tier) for tier in Tier}

    def entries(self) -> int:
        """How many (rank, tier, block) are stored."""
        return sum(self.blocks(rank, tier) for rank in self._slots for tier in Tier)

    def dump(self) -> dict[tuple[WorkerRank, Tier], set[SequenceHash]]:
        """Everything, for comparison in tests and by hand."""
        ranks = {slot: rank for rank, slot in self._slots.items()}
        found: dict[tuple[WorkerRank, Tier], set[SequenceHash]] = {(r, t): set() for r in self._slots for t in Tier}
        for tier in Tier:
            for slot, blocks in self._tables[tier].dump():
                if slot in ranks:
                    found[ranks[slot], tier].update(blocks)
        return found

    def _store(self, slot: int, part: int, hashes: SequenceHashes | Sequence[SequenceHash]) -> int:
        table = self._tables[part]  # after `_slot`, which may replace it
        created = table.store(slot, as_hashes(hashes))
        if table.freed:
            self._set_free(part)
        return created

    def _remove(self, rank: WorkerRank, part: int, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        slot, table = self._slots.get(rank), self._tables.get(part)
        if slot is not None and table is not None:
            table.remove(slot, as_hashes(hashes))
            if table.freed:
                self._set_free(part)

    def _slot(self, rank: WorkerRank) -> int | None:
        """The rank's slot; None if there is no memory for one more rank."""
        slot = self._slots.get(rank)
        if slot is None:
            if not self._free and not self._widen():
                return None
            slot = self._slots[rank] = self._free.pop()
            self._positions.clear()
            self._live_slots[0, slot >> 6] |= np.uint64(1 << (slot & 63))
        return slot

    def _refuse(self, hashes: int) -> None:
        """Count blocks refused for want of a slot, and go on with the sweep that frees some."""
        self._refused += hashes
        for part, table in self._tables.items():
            table.go_on(hashes)
            self._set_free(part)

    def _empty_tables(self) -> dict[int, PackedTable]:
        return {int(tier): self._empty_table(tier) for tier in Tier}

    def _empty_table(self, part: int) -> PackedTable:
        limit = None if self._max_bytes is None else partial(self._left_for, part)
        return PackedTable(limit, self._secret)

    def _add_table(self, window: int) -> bool:
        """False if there are too many windows, or no memory for another table."""
        table = self._empty_table(-window)
        table.widen(self._live_slots.shape[1])
        room = self._max_bytes is None or table.reserved <= self._max_bytes - self._reserved
        if not room or len(self._tables) == len(Tier) + _MOST_WINDOWS:
            return False
        self._tables[-window] = table
        return True

    def _widen(self) -> bool:
        """Make slots for twice the ranks; returns whether that was possible."""
        words = 2 * self._live_slots.shape[1]
        if 64 * words > MAX_SLOTS:
            raise OverflowError(f"more than {MAX_SLOTS} ranks")
        if not self._make_room_to_widen(words):
            return False
        for table in self._tables.values():
            table.widen(words)
        self._live_slots = np.pad(self._live_slots, ((0, 0), (0, words // 2)))
        self._free += range(64 * words - 1, 32 * words - 1, -1)
        return True

    def _make_room_to_widen(self, words: int) -> bool:
        """Rows are copied to become wider. If there is no memory for that, all content is dropped."""
        more = sum(table.bytes_to_widen(words) for table in self._tables.values())
        if self._max_bytes is None or more <= self._max_bytes - self._reserved:
            return True
        if self._busy or LEAST_BYTES * words > self._max_bytes:
            return False  # slots will become free soon, or it would not help
        self._refused, self._evicted = self.refused, self.evicted + self.entries()
        self._tables = self._empty_tables()
        return True

    @property
    def _reserved(self) -> int:
        return sum(table.reserved for table in self._tables.values())

    def _left_for(self, part: int) -> int:
        """Bytes that a table may still take: first come, first served."""
        return (self._max_bytes or 0) - self._reserved + self._tables[part].reserved

    def _begin_anew(self, part: int) -> None:
        """Replace a table in which nobody holds anything: it might never be swept, and others need the memory."""
        table = self._tables.pop(part)
        self._evicted, self._refused = self._evicted + table.evicted, self._refused + table.refused
        if part >= 0 or -part in self._bound:
            self._tables[part] = self._empty_table(part)
            self._tables[part].widen(self._live_slots.shape[1])
        for slot in [slot for slot, parts in self._busy.items() if part in parts]:
            self._sweep_out(slot, part)

    def _set_free(self, part: int) -> None:
        freed = self._tables[part].freed
        while freed:
            self._sweep_out(freed.pop(), part)

    def _sweep_out(self, slot: int, part: int) -> None:
        self._busy[slot].discard(part)
        if not self._busy[slot]:
            del self._busy[slot]
            self._free.append(slot)


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after. Not to be called while
    serving."""
    index, rank = PrefixIndex(), WorkerRank("", 0)
    hashed = chain_hashes(pack_tokens([0, 1]), 1, 0)
    # Hashes of events are read-only, which is another type to the compiler.
    for hashes in (hashed, np.frombuffer(hashed.tobytes(), np.uint64)):
        for tier in (Tier.GPU, Tier.CPU):
            index.store(rank, tier, hashes)
            index.find_matches(hashes)
            index.remove(rank, tier, hashes[:1])
    index.store(rank, Tier.GPU, hashed)
    index.store_window(rank, 1, hashed)
    index.find_matches(hashed)
    index.clear(rank)  # begins a migration, which the next `store` continues
    index.store(rank, Tier.GPU, hashed)
    index.dump()  # serves nobody, but all kernels are to be kept


def as_hashes(hashes: SequenceHashes | Sequence[SequenceHash]) -> SequenceHashes:
    return hashes if isinstance(hashes, np.ndarray) else np.array(hashes, np.uint64)
