"""The prefix index's table: which slots hold which sequence hash, packed into arrays and worked on by compiled loops.

Open addressing with linear probing on the sequence hash itself, which is as good as random. A value holds up to four
16-bit slots; a block with more holders has a row of bits in `rows`. Entries are never moved but by a *migration*, which
copies the table into a fresh one a little with every call, so that no call takes long. It is how the table grows, how
tombstones of removed entries vanish, and how the slots of a cleared rank become free again.

An entry costs 16 bytes at a fill of 35 to 70 %: 23 to 46 bytes for a block of up to four holders (and as much again
while it is being migrated), and 8 more for each 64 slots of the fleet from five holders on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.hashing import SequenceHashes
from indexer.jit import inlined, kernel

Bits: TypeAlias = npt.NDArray[np.uint64]
Masks: TypeAlias = npt.NDArray[np.uint64]
"""A row of bits, one for each slot, for each of a prompt's blocks."""
Counts: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.uint32]
Depths: TypeAlias = npt.NDArray[np.int32]
"""Blocks by slot, and a last element that stays 0, for ranks without a slot."""

MAX_SLOTS = 0xFFF0
_SMALLEST = 1024
_FULLEST = 0.7
_FRESH = 0.45
_STEP = 64
_STEPS_PER_HASH = 8
"""Positions migrated with each call, and for each of its hashes: a migration is over long before the new table, which
starts at most 45 % full, could need one itself at 70 %."""

_EMPTY = np.uint64(0)
_TOMB = np.uint64(1)
_FIRST = np.uint64(2)  # the first key that is no mark
_SALT = np.uint64(0x9E3779B97F4A7C15)  # makes keys of hashes, so that the marks stand for two hashes that nobody meets
_NONE = np.uint64(0xFFFF)
_IN_ROW = np.uint64(0xFFFE)  # in the top 16 bits: the rest is a row
_ROW_MASK = np.uint64(0xFFFFFFFF)
_NOBODY = np.uint64(0xFFFFFFFFFFFFFFFF)
_ABSENT = np.int64(-1)
_0, _1, _6, _16, _32, _48, _63 = (np.uint64(n) for n in (0, 1, 6, 16, 32, 48, 63))

# Indices into `Arrays.state`.
_USED, _LIVE, _CURSOR, _FREE = 0, 1, 2, 3


class Arrays(NamedTuple):
    """All of one table. `old_*` are what is being migrated from (`state[_CURSOR]` onwards), or nothing."""

    keys: SequenceHashes
    values: SequenceHashes
    old_keys: SequenceHashes
    old_values: SequenceHashes
    rows: Bits
    free_rows: Rows
    """A stack of the rows not in use, `state[_FREE]` high."""
    dead: Bits
    """Slots that the migration under way drops."""
    counts: Counts
    """Blocks per slot."""
    state: Counts


@inlined
def _probe(keys: SequenceHashes, block: np.uint64) -> np.int64:
    """Position of `block`, or −1."""
    mask = np.uint64(len(keys) - 1)
    at = block & mask
    found = _ABSENT
    while True:
        key = keys[at]
        if key == block:
            found = np.int64(at)
            break
        if key == _EMPTY:
            break
        at = (at + _1) & mask
    return found


@inlined
def _insert(keys: SequenceHashes, block: np.uint64, state: Counts) -> np.int64:
    """A place for `block`, which is not there yet; tombstones are left to the next migration."""
    mask = np.uint64(len(keys) - 1)
    at = block & mask
    while keys[at] != _EMPTY:
        at = (at + _1) & mask
    keys[at] = block
    state[_USED] += 1
    return np.int64(at)


@inlined
def _release_row(rows: Bits, free_rows: Rows, state: Counts, row: np.int64) -> None:
    for word in range(rows.shape[1]):
        rows[row, word] = _0
    free_rows[state[_FREE]] = row
    state[_FREE] += 1


@inlined
def _holds(rows: Bits, value: np.uint64, slot: np.uint64) -> bool:
    if (value >> _48) == _IN_ROW:
        return bool((rows[np.int64(value & _ROW_MASK), slot >> _6] >> (slot & _63)) & _1)
    return bool(
        value & _NONE == slot
        or (value >> _16) & _NONE == slot
        or (value >> _32) & _NONE == slot
        or (value >> _48) == slot
    )


@inlined
def _with_slot(rows: Bits, free_rows: Rows, state: Counts, value: np.uint64, slot: np.uint64) -> np.uint64:
    """`value` with one holder more, who is none yet. Needs a free row."""
    if (value >> _48) == _IN_ROW:
        rows[np.int64(value & _ROW_MASK), slot >> _6] |= _1 << (slot & _63)
        return value
    for place in range(4):
        shift = np.uint64(16 * place)
        if (value >> shift) & _NONE == _NONE:
            return np.uint64((value & ~(_NONE << shift)) | (slot << shift))
    state[_FREE] -= 1
    row = free_rows[state[_FREE]]
    for place in range(4):
        held = (value >> np.uint64(16 * place)) & _NONE
        rows[row, held >> _6] |= _1 << (held & _63)
    rows[row, slot >> _6] |= _1 << (slot & _63)
    return np.uint64((_IN_ROW << _48) | np.uint64(row))


@inlined
def _without_slot(rows: Bits, free_rows: Rows, state: Counts, value: np.uint64, slot: np.uint64) -> np.uint64:
    """`value` with one holder less, who is one; `_NOBODY` when it was the last."""
    if (value >> _48) != _IN_ROW:
        for place in range(4):
            shift = np.uint64(16 * place)
            if (value >> shift) & _NONE == slot:
                return np.uint64(value | (_NONE << shift))
        return value
    row = np.int64(value & _ROW_MASK)
    rows[row, slot >> _6] &= ~(_1 << (slot & _63))
    for word in range(rows.shape[1]):
        if rows[row, word]:
            return value
    _release_row(rows, free_rows, state, row)
    return _NOBODY


@inlined
def _without(rows: Bits, free_rows: Rows, state: Counts, value: np.uint64, dead: Bits) -> np.uint64:
    """`value` without the slots in `dead`."""
    if (value >> _48) == _IN_ROW:
        row = np.int64(value & _ROW_MASK)
        left = _0
        for word in range(len(dead)):
            rows[row, word] &= ~dead[word]
            left |= rows[row, word]
        if left:
            return value
        _release_row(rows, free_rows, state, row)
        return _NOBODY
    kept = value
    for place in range(4):
        shift = np.uint64(16 * place)
        slot = (value >> shift) & _NONE
        if slot != _NONE and (dead[slot >> _6] >> (slot & _63)) & _1:
            kept |= _NONE << shift
    return np.uint64(kept)


@kernel
def _move(a: Arrays, old: np.int64) -> np.int64:
    """One entry from the old table to the new, without dead slots; −1 when nobody is left."""
    block, value = a.old_keys[old], _without(a.rows, a.free_rows, a.state, a.old_values[old], a.dead)
    a.old_keys[old] = _TOMB
    if value == _NOBODY:
        a.state[_LIVE] -= 1
        return _ABSENT
    at = _insert(a.keys, block, a.state)
    a.values[at] = value
    return at


@kernel
def _fetch(a: Arrays, block: np.uint64) -> np.int64:
    """Moves `block` before its turn; −1 when the old table does not have it either."""
    old = _probe(a.old_keys, block)
    return _move(a, old) if old >= 0 else _ABSENT


@kernel
def _migrate(a: Arrays, steps: int) -> bool:
    """Moves on by `steps` positions; whether all is moved."""
    at = a.state[_CURSOR]
    end = min(at + steps, len(a.old_keys))
    while at < end:
        if a.old_keys[at] >= _FIRST:
            _move(a, at)
        at += 1
    a.state[_CURSOR] = at
    return bool(at == len(a.old_keys))


# What Python calls takes the arrays one by one: numba unpacks them in half the time of a NamedTuple of them. What is
# called for every block takes only the arrays it needs: each one handed over has its references counted.


@kernel
def _store(
    keys: SequenceHashes,
    values: SequenceHashes,
    old_keys: SequenceHashes,
    old_values: SequenceHashes,
    rows: Bits,
    free_rows: Rows,
    dead: Bits,
    counts: Counts,
    state: Counts,
    slot: np.uint64,
    hashes: SequenceHashes,
    steps: int,
) -> bool:
    """Whether the migration is through."""
    migrating = len(old_keys) > 1
    for given in hashes:
        block = given ^ _SALT
        at = _probe(keys, block)
        if at < 0 and migrating:
            at = _fetch(Arrays(keys, values, old_keys, old_values, rows, free_rows, dead, counts, state), block)
        if at < 0:
            at = _insert(keys, block, state)
            values[at] = _NOBODY
            state[_LIVE] += 1
        value = values[at]
        if not _holds(rows, value, slot):
            values[at] = _with_slot(rows, free_rows, state, value, slot)
            counts[slot] += 1
    if migrating:
        return _migrate(Arrays(keys, values, old_keys, old_values, rows, free_rows, dead, counts, state), steps)
    return False


@kernel
def _remove(
    keys: SequenceHashes,
    values: SequenceHashes,
    old_keys: SequenceHashes,
    old_values: SequenceHashes,
    rows: Bits,
    free_rows: Rows,
    dead: Bits,
    counts: Counts,
    state: Counts,
    slot: np.uint64,
    hashes: SequenceHashes,
    steps: int,
) -> bool:
    """Whether the migration is through."""
    migrating = len(old_keys) > 1
    for given in hashes:
        block = given ^ _SALT
        at = _probe(keys, block)
        if at < 0 and migrating:
            at = _fetch(Arrays(keys, values, old_keys, old_values, rows, free_rows, dead, counts, state), block)
        if at < 0 or not _holds(rows, values[at], slot):
            continue
        value = _without_slot(rows, free_rows, state, values[at], slot)
        values[at] = value
        counts[slot] -= 1
        if value == _NOBODY:
            keys[at] = _TOMB
            state[_LIVE] -= 1
    if migrating:
        return _migrate(Arrays(keys, values, old_keys, old_values, rows, free_rows, dead, counts, state), steps)
    return False


@inlined
def _find(keys: SequenceHashes, values: SequenceHashes, block: np.uint64) -> np.uint64:
    """The value of `block`, `_NOBODY` if it is not there. (`_probe` with its signed position takes twice the time.)"""
    mask = np.uint64(len(keys) - 1)
    at = block & mask
    value = _NOBODY
    while True:
        key = keys[at]
        if key == block:
            value = values[at]
            break
        if key == _EMPTY:
            break
        at = (at + _1) & mask
    return value


@kernel
def _few(value: np.uint64, word: int) -> np.uint64:
    """The holders named in `value` itself among slots 64 × `word` and up, as bits."""
    bits = _0
    for place in range(4):
        slot = (value >> np.uint64(16 * place)) & _NONE
        if slot >> _6 == np.uint64(word):  # no holder: far beyond any word
            bits |= _1 << (slot & _63)
    return np.uint64(bits)


@kernel
def _note(bits: np.uint64, word: int, depth: int, depths: Depths) -> None:
    slot = word * 64
    while bits:
        while not bits & np.uint64(0xFF):
            bits >>= np.uint64(8)
            slot += 8
        if bits & _1:
            depths[slot] = depth
        bits >>= _1
        slot += 1


@kernel
def _walk(
    keys: SequenceHashes,
    values: SequenceHashes,
    old_keys: SequenceHashes,
    old_values: SequenceHashes,
    rows: Bits,
    live: Bits,
    hashes: SequenceHashes,
    depths: Depths,
) -> None:
    """Into `depths`: how many of the leading `hashes` each slot in `live` holds."""
    alive = live.copy()
    migrating = len(old_keys) > 1
    first, last_word = 0, len(alive) - 1
    last = _NOBODY
    for depth in range(len(hashes)):
        value = _find(keys, values, hashes[depth] ^ _SALT)
        if migrating and value == _NOBODY:
            value = _find(old_keys, old_values, hashes[depth] ^ _SALT)
        in_row = (value >> _48) == _IN_ROW
        if value == last and not in_row and value != _NOBODY:
            continue  # the same few holders as of the block before
        last = value
        row = np.uint64(value & _ROW_MASK)
        left = _0
        while first < last_word and alive[first] == _0:
            first += 1
        for word in range(first, len(alive)):
            before = alive[word]
            if before == _0:
                continue
            kept = before & (rows[row, word] if in_row else _few(value, word))
            if kept != before:
                _note(before ^ kept, word, depth, depths)
                alive[word] = kept
            left |= kept
        if left == _0:
            return
    for word in range(len(alive)):
        _note(alive[word], word, len(hashes), depths)


@kernel
def _mark(
    keys: SequenceHashes,
    values: SequenceHashes,
    old_keys: SequenceHashes,
    old_values: SequenceHashes,
    rows: Bits,
    hashes: SequenceHashes,
    masks: Masks,
) -> None:
    """Adds each block's holders to its row of `masks`."""
    for i in range(len(hashes)):
        value = _find(keys, values, hashes[i] ^ _SALT)
        if value == _NOBODY:
            value = _find(old_keys, old_values, hashes[i] ^ _SALT)
        row = np.uint64(value & _ROW_MASK)
        in_row = (value >> _48) == _IN_ROW
        for word in range(masks.shape[1]):
            masks[i, word] |= rows[row, word] if in_row else _few(value, word)


@kernel
def walk_masks(live: Bits, masks: Masks, depths: Depths) -> None:
    """Like `PackedTable.walk`, over holders that `PackedTable.mark` has gathered."""
    alive = live.copy()
    for depth in range(len(masks)):
        left = _0
        for word in range(len(alive)):
            kept = alive[word] & masks[depth, word]
            _note(alive[word] ^ kept, word, depth, depths)
            alive[word] = kept
            left |= kept
        if not left:
            return
    for word in range(len(alive)):
        _note(alive[word], word, len(masks), depths)


class PackedTable:
    """The blocks of one tier. Slots are small numbers, given out by whoever owns the table."""

    def __init__(self) -> None:
        self._a = Arrays(
            *_fresh(_SMALLEST),
            *_fresh(1),
            np.zeros((0, 1), np.uint64),
            np.zeros(0, np.uint32),
            np.zeros(1, np.uint64),
            np.zeros(64, np.int64),
            np.zeros(4, np.int64),
        )
        self._condemned: set[int] = set()
        self._dying: set[int] = set()

    def __len__(self) -> int:
        """Distinct blocks; those of condemned slots count until they are dropped."""
        return int(self._a.state[_LIVE])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._a)

    @property
    def words(self) -> int:
        """Of 64 slots each."""
        return len(self._a.dead)

    def widen(self, words: int) -> None:
        """Make room for slots up to 64 × `words`."""
        a, more = self._a, words - self.words
        self._a = a._replace(
            rows=np.pad(a.rows, ((0, 0), (0, more))),
            dead=np.pad(a.dead, (0, more)),
            counts=np.pad(a.counts, (0, 64 * more)),
        )

    def count(self, slot: int) -> int:
        """Blocks that `slot` holds."""
        return int(self._a.counts[slot])

    def store(self, slot: int, hashes: SequenceHashes) -> set[int]:
        """Returns the condemned slots that are now free for reuse."""
        self._make_room(len(hashes))
        return self._settle(_store(*self._a, np.uint64(slot), hashes, self._steps(len(hashes))))

    def remove(self, slot: int, hashes: SequenceHashes) -> set[int]:
        """Returns the condemned slots that are now free for reuse."""
        return self._settle(_remove(*self._a, np.uint64(slot), hashes, self._steps(len(hashes))))

    def condemn(self, slot: int) -> None:
        """`slot` holds nothing any more. It may be used again once `store` or `remove` has returned it."""
        self._a.counts[slot] = 0
        self._condemned.add(slot)
        if not self._migrating:
            self._begin_migration()

    def walk(self, live: Bits, hashes: SequenceHashes, depths: Depths) -> None:
        """Into `depths`: how many of the leading `hashes` each slot in `live` holds."""
        a = self._a
        _walk(a.keys, a.values, a.old_keys, a.old_values, a.rows, live, hashes, depths)

    def mark(self, hashes: SequenceHashes, masks: Masks) -> None:
        """Adds each block's holders to its row of `masks`."""
        a = self._a
        _mark(a.keys, a.values, a.old_keys, a.old_values, a.rows, hashes, masks)

    def items(self) -> Iterator[tuple[int, list[int]]]:
        """Each block with its slots, condemned ones included: for comparison in tests and by hand."""
        mask = np.zeros(self.words, np.uint64)
        for keys in (self._a.keys, self._a.old_keys):
            for block in keys[keys >= _FIRST] ^ _SALT:
                mask[:] = 0
                self.mark(np.array([block]), mask.reshape(1, -1))
                yield int(block), [s for s in range(64 * self.words) if int(mask[s >> 6]) >> (s & 63) & 1]

    @property
    def _migrating(self) -> bool:
        return len(self._a.old_keys) > 1

    def _steps(self, hashes: int) -> int:
        return _STEP + _STEPS_PER_HASH * hashes if self._migrating else 0

    def _make_room(self, hashes: int) -> None:
        if self._a.state[_USED] + hashes > _FULLEST * len(self._a.keys):
            if self._migrating:
                self._settle(_store(*self._a, np.uint64(0), _NO_HASHES, len(self._a.old_keys)))
            self._begin_migration(hashes)
        if self._a.state[_FREE] < hashes:
            self._add_rows(max(hashes, len(self._a.rows), 64))

    def _add_rows(self, more: int) -> None:
        a = self._a
        free = a.free_rows[: a.state[_FREE]]
        fresh = np.arange(len(a.rows), len(a.rows) + more, dtype=np.uint32)
        stack = np.zeros(len(a.rows) + more, np.uint32)
        stack[: len(free) + more] = np.concatenate((free, fresh))
        self._a = a._replace(rows=np.concatenate((a.rows, np.zeros((more, self.words), np.uint64))), free_rows=stack)
        a.state[_FREE] += more

    def _begin_migration(self, hashes: int = 0) -> None:
        a = self._a
        size = _SMALLEST
        while size * _FRESH < len(self) + hashes:
            size *= 2
        keys, values = _fresh(size)
        self._dying, self._condemned = self._condemned, set()
        dead = np.zeros_like(a.dead)
        for slot in self._dying:
            dead[slot >> 6] |= np.uint64(1 << (slot & 63))
        a.state[_USED] = a.state[_CURSOR] = 0
        self._a = a._replace(keys=keys, values=values, old_keys=a.keys, old_values=a.values, dead=dead)

    def _settle(self, through: bool) -> set[int]:
        """Slots set free by a migration that has just ended."""
        if not (through and self._migrating):
            return set()
        freed, self._dying = self._dying, set()
        old_keys, old_values = _fresh(1)
        self._a = self._a._replace(old_keys=old_keys, old_values=old_values, dead=np.zeros_like(self._a.dead))
        self._a.state[_CURSOR] = 0
        if self._condemned:
            self._begin_migration()
        return freed


_NO_HASHES = np.zeros(0, np.uint64)


def _fresh(size: int) -> tuple[SequenceHashes, SequenceHashes]:
    """Untouched pages of zeros cost no memory yet."""
    return np.zeros(size, np.uint64), np.zeros(size, np.uint64)
