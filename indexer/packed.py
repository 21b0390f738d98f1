"""The prefix index's table: which slots hold which sequence hash, packed into arrays and worked on by compiled loops.

Open addressing with linear probing. Entries are never moved but by a *migration*, which copies the table into a fresh
one a little with every call, so that no call takes long. It is how the table grows, how tombstones of removed entries
vanish, how the slots of a cleared rank become free again, and how entries are evicted where memory is limited.

An entry costs 16 bytes at a fill of 40 to 70 %: 23 to 40 bytes for a block of up to four holders (and as much again
while it is being migrated), and 8 more for each 64 slots of the fleet from five holders on.

Eviction, where memory is limited: second chance (CLOCK: Corbató, "A Paging Experiment with the Multics System", 1968),
with a *generation* in each entry, that of its last use, in place of a reference bit (as in Linux's multi-generational
LRU). A block is used when it is stored or looked up. A generation ends when a quarter of the table was filled, or when
the table is nearly full and may not grow: then the clock's hand goes round, in a migration that drops what is older
than `MAX_AGE` generations and, where that is too little, younger ones, but none of this generation or the one before.
What finds no room even so is refused. So a rank may hold more than is found here, never less; a block whose parent was
dropped is not reached, and goes in its turn.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from indexer import kernels
from indexer.kernels import (
    ALL_AGES,
    CURSOR,
    EVICTED,
    FREE_ROWS,
    GENERATION,
    LIVE,
    MAX_AGE,
    NEXT_ROW,
    NO_SECRET,
    REFUSED,
    ROOM,
    SECRET,
    STATES,
    Depths,
    Rows,
    Words,
    blocks_in,
)

_Number = TypeVar("_Number", bound=np.generic)

_SMALLEST = 256
"""Entries of an empty table."""
_SMALL = 4096
"""Entries; bigger tables take whole huge pages."""
_FULLEST = 0.7
"""How full a table becomes before it is migrated."""
_FRESH = 0.4
"""How full the table that it is migrated into is at the start, at most, unless memory is short."""
_MOST_HASHES = 1024
"""Hashes that are stored at once; more are stored in parts."""
_STEP = 64
_STEPS_PER_HASH = 8
"""Places of the old table that each call migrates: `_STEP`, and so many for each of its hashes. So a migration is over
before the new table, which is at least half as large and starts at most 40 % full, could need one itself at 70 %."""
_AT_ONCE = _STEPS_PER_HASH * _MOST_HASHES
"""Places that a call migrates if the new table has no room for its hashes and the migration is not over. No more than
these are left then, unless memory is short."""
_HASHES_PER_PAGE = 1024
"""A table of huge pages is *laid* before it is used: with every so many hashes, one of its pages is written to. The
first write to a page takes the kernel up to milliseconds, and the first few stores would meet all of them."""
_LAYING = 64
"""While the next table is laid, the present one may fill up further, by one place in so many of its words: about twice
what those hashes can take. Where memory is short, what is spare has to do."""
_SPARE = 16
"""Where memory is short, the next migration begins when one place in so many is still free, as it may have to evict to
make room."""
_GENERATIONS = 4
"""Generations in which an empty table becomes full."""
_MAX_MORE_ROWS = 1 << 20
"""Bytes by which rows grow at once, at most, as all of them are cleared."""
_ROWS_SHARE = 8
"""Entries leave one part in so many of the memory to rows and other tables."""
_MOST_COPIED = 1 << 25
"""Bytes of rows that may have to be copied to grow: bigger allocations have pages of their own, which `realloc`
moves."""
_CRAMMED = 0.8
"""How full a table may become to give memory to rows and other tables."""
_ENTRY = 16
"""Bytes."""
_HUGE_PAGE = (1 << 21) // _ENTRY
"""In entries; a table takes none or some whole ones."""
_NO_ENTRIES = np.zeros(2, np.uint64)
_NONE_DEAD = np.zeros(0, np.uint64)


class PackedTable:
    """The blocks of one tier. Slots are small numbers, given out by whoever owns the table."""

    def __init__(self, limit: Callable[[], int] | None = None, secret: int = NO_SECRET) -> None:
        """`limit`: bytes that `reserved` may come to by now. `secret`: see `PrefixIndex`."""
        self._limit = limit
        self._table = _entries(_SMALLEST)
        self._old = self._next = _NO_ENTRIES
        """The table that is migrated from, and the one that is laid."""
        self._laid = self._due = 0
        """Words of the next table that are ready, and hashes since its latest page was written to."""
        self._short = False
        """The next table is smaller than it should be, as memory is short."""
        self._rows = np.zeros((1, 1), np.uint64)
        self._dead = np.zeros(1, np.uint64)
        """The slots that are condemned or dying, as bits."""
        self._counts = np.zeros(64, np.int64)
        self._state = np.zeros(STATES, np.int64)
        self._figures: memoryview[int] = self._state.data  # single numbers are read and written there in half the time
        self._figures[ROOM] = int(_FULLEST * _SMALLEST)
        self._figures[SECRET] = secret
        self._spare = 0
        """Places that must be free; else the next migration begins."""
        self._kept = ALL_AGES
        """The greatest age that the migration under way keeps: older entries are evicted."""
        self._expect_generation()
        self.freed: set[int] = set()
        """Slots that were condemned and hold nothing any more: for the owner to take out."""
        self._condemned: set[int] = set()
        """Slots whose blocks the next migration drops."""
        self._dying: set[int] = set()
        """Slots whose blocks the migration under way drops."""

    def __len__(self) -> int:
        """Distinct blocks; those of condemned slots count until they are dropped."""
        return self._figures[LIVE]

    @property
    def nbytes(self) -> int:
        arrays = (self._table, self._old, self._next, self._rows, self._dead, self._counts, self._state)
        return sum(array.nbytes for array in arrays)

    @property
    def reserved(self) -> int:
        """Bytes with those that the next migration needs if the table may not grow, and with a copy of the rows."""
        entries = self._table.nbytes + self._old.nbytes + self._next.nbytes
        return self.nbytes - entries + self._entries_reserved + min(self._rows.nbytes, _MOST_COPIED)

    @property
    def _entries_reserved(self) -> int:
        return 2 * max(self._table.nbytes, self._old.nbytes, self._next.nbytes)

    @property
    def evicted(self) -> int:
        """How many (slot, block) were dropped for want of memory."""
        return self._figures[EVICTED]

    @property
    def refused(self) -> int:
        """How many (slot, block) were not taken in for want of memory."""
        return self._figures[REFUSED]

    @property
    def words(self) -> int:
        """Of 64 slots each."""
        return len(self._dead)

    def bytes_to_widen(self, words: int) -> int:
        """What `widen` needs while it is at work, and `reserved` afterwards."""
        return words // self.words * (2 * self._rows.nbytes + self._dead.nbytes + self._counts.nbytes)

    def widen(self, words: int) -> None:
        """Make room for slots up to 64 × `words`."""
        self._rows = _widened(self._rows, words)
        self._dead = _widened(self._dead, words)
        self._counts = _widened(self._counts, 64 * words)

    def count(self, slot: int) -> int:
        """Blocks that `slot` holds."""
        return int(self._counts[slot])

    def is_held_beside(self, slot: int) -> bool:
        """Whether another slot, that is not condemned, holds anything."""
        return int(np.count_nonzero(self._counts)) > (self.count(slot) > 0)

    def store(self, slot: int, hashes: Words) -> int:
        """Returns how many no slot held before that is not condemned."""
        created = 0
        for start in range(0, len(hashes), _MOST_HASHES):
            part = hashes[start : start + _MOST_HASHES]
            self._make_room(len(part))
            dead = self._dead if self._dying or self._condemned else _NONE_DEAD
            created += kernels.store(self._table, self._old, self._rows, dead, self._counts, self._state, slot, part)
        return created

    def remove(self, slot: int, hashes: Words) -> None:
        kernels.remove(self._table, self._old, self._rows, self._counts, self._state, slot, hashes)
        self.go_on(len(hashes))

    def condemn(self, slot: int) -> None:
        """`slot` holds nothing any more. It may be used again once it is among the `freed`."""
        self._counts[slot] = 0
        self._condemned.add(slot)
        self._dead[slot >> 6] |= np.uint64(1 << (slot & 63))
        if not (self._migrating or self._laying):
            self._begin_migration(0)

    def go_on(self, hashes: int) -> None:
        """Go on with laying the next table, or with the migration, as far as is due for so many hashes."""
        if self._laying:
            self._lay(hashes)
        elif self._migrating and self._migrate(_STEP + _STEPS_PER_HASH * hashes) and self._condemned:
            self._begin_migration(hashes)

    def walk(self, slots: Rows, hashes: Words, depths: Depths) -> int:
        """Into `depths`: how many of the leading `hashes` each live slot holds; returns the most that one does."""
        return kernels.walk(self._table, self._old, self._rows, self._state, slots, hashes, depths)

    def mark(self, hashes: Words, masks: Rows) -> None:
        """Adds each block's holders to its row of `masks`."""
        kernels.mark(self._table, self._old, self._rows, self._state, hashes, masks)

    def dump(self) -> Iterator[tuple[int, list[int]]]:
        """Slots with blocks they hold, condemned ones included: for comparison in tests and by hand."""
        for entries in (self._table, self._old):
            masks = np.zeros((len(entries) // 2, self.words), np.uint64)
            kernels.read_holders(entries, self._rows, masks)
            held = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
            blocks = blocks_in(entries, self._figures[SECRET])
            for slot in np.flatnonzero(held.any(axis=0)):
                yield int(slot), blocks[held[:, slot] != 0].tolist()

    @property
    def _migrating(self) -> bool:
        return self._old is not _NO_ENTRIES

    @property
    def _laying(self) -> bool:
        return self._next is not _NO_ENTRIES

    def _make_room(self, hashes: int) -> None:
        """Make room for so many blocks and rows, where memory allows it; and do a part of the migration under way."""
        if self._figures[FREE_ROWS] < hashes:
            self._add_rows(hashes)
        if self._figures[ROOM] < hashes + self._spare or self._figures[FREE_ROWS] < hashes:
            self._resize(hashes)
        if self._figures[ROOM] < self._next_generation:
            self._begin_generation()
        self.go_on(hashes)

    def _resize(self, hashes: int) -> None:
        if self._migrating and self._figures[ROOM] < hashes:
            if self._spare:
                self._kept = max(1, min(self._kept, MAX_AGE) - 1)
            self._migrate(_AT_ONCE)
        if self._laying:
            if min(self._figures[ROOM], self._figures[FREE_ROWS]) < hashes:
                self._use_next(hashes)
        elif not self._migrating:  # else memory is short, and what is dropped makes room
            self._begin_migration(hashes)

    def _size_for(self, hashes: int) -> int:
        """In entries."""
        size = max(int((len(self) + hashes) / _FRESH), len(self._table) // 4)
        return -(-size // _HUGE_PAGE) * _HUGE_PAGE if size > _SMALL else max(_SMALLEST, size)

    def _largest(self) -> int:
        """The most entries that memory allows for the next table and its own migration, beside some for rows; but never
        too few for what is there."""
        if self._limit is None:
            return sys.maxsize
        limit = self._limit()
        left = limit - limit // _ROWS_SHARE - (self.reserved - self._entries_reserved)
        size = left // (2 * _ENTRY)
        size -= size % _HUGE_PAGE if size > _HUGE_PAGE else 0
        needed = min(int(len(self) / _CRAMMED) + 1, len(self._table) // 2)
        return max(size, needed, _SMALLEST)

    def _begin_migration(self, hashes: int) -> None:
        more = 0 if self._spare else len(self._table) // _LAYING
        wanted = self._size_for(hashes + more)
        size = min(wanted, self._largest())
        self._short = size < wanted
        self._next = _entries(size)
        self._laid = self._due = 0
        if size % _HUGE_PAGE or self._figures[ROOM] + more < hashes + _HASHES_PER_PAGE * (size // _HUGE_PAGE):
            self._use_next(hashes)
        else:
            self._figures[ROOM] += more
            self._next_generation += more

    def _lay(self, hashes: int) -> None:
        self._due += hashes
        while self._due >= _HASHES_PER_PAGE and self._laid < len(self._next):
            self._next[self._laid] = 0
            self._laid += 2 * _HUGE_PAGE
            self._due -= _HASHES_PER_PAGE
        if self._laid >= len(self._next):
            self._use_next(hashes)

    def _use_next(self, hashes: int) -> None:
        """The migration itself begins."""
        size = len(self._next) // 2
        self._spare = size // _SPARE if self._short else 0
        self._table, self._old, self._next = self._next, self._table, _NO_ENTRIES
        self._dying, self._condemned = self._condemned, set()
        self._figures[CURSOR] = 0
        self._figures[ROOM] = int(_FULLEST * size) - len(self)
        if self._figures[ROOM] < size // _STEPS_PER_HASH + hashes:  # the next would be due before this one is over
            self._kept = MAX_AGE
            self._begin_generation()
        else:
            self._kept = ALL_AGES
            self._expect_generation()

    def _begin_generation(self) -> None:
        self._figures[GENERATION] = (self._figures[GENERATION] + 1) % 16
        self._expect_generation()

    def _expect_generation(self) -> None:
        """The next generation begins when a part of the table was filled. Where nothing is ever evicted, one is
        enough."""
        part = _FULLEST * len(self._table) / (2 * _GENERATIONS)
        self._next_generation = -sys.maxsize if self._limit is None else int(self._figures[ROOM] - part)

    def _migrate(self, steps: int) -> bool:
        """Migrate so many places more; returns whether the migration is over."""
        through = kernels.migrate(
            self._table, self._old, self._rows, self._dead, self._counts, self._state, self._kept, steps
        )
        if through:
            self._old = _NO_ENTRIES
            self.freed |= self._dying
            for slot in self._dying:
                self._dead[slot >> 6] &= ~np.uint64(1 << (slot & 63))
            self._dying = set()
            self._expect_generation()
        return through

    def _add_rows(self, hashes: int) -> None:
        first, width = len(self._rows), self._rows.itemsize * self.words
        more = max(hashes, min(first, _MAX_MORE_ROWS // width))
        if self._limit is not None:
            more = min(more, (self._limit() - self.reserved) // (2 * width))
        if more > 0:
            # In place: nobody else holds on to the rows, and they may be many.
            self._rows.resize((first + more, self.words), refcheck=False)
            self._rows[first:, 0] = np.arange(first + 1, first + more + 1)
            self._rows[-1, 0] = self._figures[NEXT_ROW]
            self._figures[NEXT_ROW] = first
            self._figures[FREE_ROWS] += more


def _widened(array: npt.NDArray[_Number], columns: int) -> npt.NDArray[_Number]:
    """With zeros after what each row holds."""
    wide = np.zeros((*array.shape[:-1], columns), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


def _entries(size: int) -> Words:
    """Pages that nobody wrote to take no memory yet; huge ones, where there are any, cost a tenth of the time."""
    if size % _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(2 * size, np.uint64)
    pages = mmap.mmap(-1, size * _ENTRY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64)
