"""The compiled loops over the prefix index's table, whose arrays `indexer.packed` owns.

An entry is a key and a value side by side, so that it is one cache line away. The value names up to four holders by
their slots, 15 bits each; a block with more holders has a row of bits in `rows` instead. The four bits on top are the
*generation* in which the entry was last stored or looked up, for eviction.

A block is in `table` or, while a migration is under way, in `old`, where it is changed until its turn to move comes.
Big tables are in none of the processor's caches, so blocks are worked on in groups: the entries of a group are touched
all at once, which takes as long as waiting for one of them.

All of it is in one file because numba compiles in what a kernel calls, and looks at that kernel's file alone to see
whether it has changed (`indexer.jit`).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.jit import inlined, loop

Words: TypeAlias = npt.NDArray[np.uint64]
"""Hashes; entries, key and value in turns; bits, one for each slot."""
Rows: TypeAlias = npt.NDArray[np.uint64]
"""Rows of bits, one bit for each slot."""
Counts: TypeAlias = npt.NDArray[np.int64]
Depths: TypeAlias = npt.NDArray[np.int32]
"""Blocks by slot; the last element stays 0, for ranks without a slot."""

# Indices into a table's `state`.
ROOM = 0
"""New blocks that may still be put into the table, beside those that are still to be migrated."""
LIVE = 1
"""Blocks held."""
CURSOR = 2
"""Index of the first word of the old table that is not migrated."""
FREE_ROWS = 3
NEXT_ROW = 4
"""The first free row, whose first word is the number of the next; row 0 is never used."""
GENERATION = 5
EVICTED = 6
"""(rank, block) dropped for want of memory, since the start."""
REFUSED = 7
"""(rank, block) not taken in for want of memory, since the start."""
SECRET = 8
"""Where keys depend on it (`_key_of`)."""
_SINK = 9  # a scratch element for reads that only load cache lines
_SCRATCH = 10
_GROUP = 32
STATES = _SCRATCH + _GROUP

# Rows of the `slots` that a walk gets: live slots, and those that hold everything so far.
_LIVE, _ALIVE = 0, 1
SLOT_ROWS = 2

NO_SECRET = 0x6A09E667F3BCC909
"""In the place of a secret: not 0, so that no likely hash has a mark as its key."""
MAX_SLOTS = 0x7FF0
MAX_AGE = 3
"""Generations since an entry was last used; each migration sets older entries to this age."""
ALL_AGES = 15

_EMPTY = np.uint64(0)
_TOMB = np.uint64(1)  # a tombstone: entries that were put behind it may still be there
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_GATHER = np.uint64(0xF1DE83E19937733D)  # its inverse modulo 2^64
_HOLDERS = np.uint64((1 << 60) - 1)
_NOBODY = _HOLDERS
_NOTHING = np.uint64(0xFFFFFFFFFFFFFFFF)  # equal to nobody's holders
_LANE = np.uint64(0x7FFF)  # one of the four places for a holder's slot; all bits: there is none
_IN_ROW = np.uint64(0x7FFE)  # in the lane on top: the rest is a row
_ROW_MASK = np.uint64(0xFFFFFFFF)
_0, _1, _2, _6, _15, _30, _32, _45, _58, _60, _63 = (np.uint64(n) for n in (0, 1, 2, 6, 15, 30, 32, 45, 58, 60, 63))
_MAX_AGE = np.uint64(MAX_AGE)
# The place of a single bit, by the top six bits of its product with a de Bruijn sequence.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[((0x03F79D71B4CB0A89 << _place) & 0xFFFFFFFFFFFFFFFF) >> 58] = _place


# Entries


@inlined
def _key_of(block: np.uint64, state: Counts) -> np.uint64:
    """Spreads hashes evenly. An entry's home is proportional to its key.

    Clients can make prompts with thousands of hashes of their choice. Without the secret they could have all of them
    in one place, where each look-up takes as many steps as there are. The first product alone would not do: hashes that
    differ in every combination of certain bits do so whatever they are XORed with, and for some choices of a dozen bits
    lie close together once multiplied.

    A bijection, but that the two hashes whose keys would be the marks share another's: taken for empty places, they
    would upset the count of those until there are none, and `_seek` never ends.
    """
    secret = np.uint64(state[SECRET])
    key = np.uint64((block ^ secret) * _SPREAD)
    return max(np.uint64((key ^ (key >> _32)) * (secret | _1)), _2)


@inlined
def _home_of(key: np.uint64, entries: Words) -> np.uint64:
    return np.uint64((((key >> _32) * (np.uint64(len(entries)) >> _1)) >> _32) << _1)


@inlined
def _seek(entries: Words, key: np.uint64) -> np.uint64:
    """Where `key` is, or else the empty place where it would be put."""
    at = _home_of(key, entries)
    while entries[at] != key and entries[at] != _EMPTY:
        at += _2
        if at == np.uint64(len(entries)):
            at = _0
    return at


@inlined
def _touch(entries: Words, hashes: Words, start: int, state: Counts) -> None:
    """Loads the cache lines of a group's entries, all at once."""
    read = _0
    for i in range(start, min(start + _GROUP, len(hashes))):
        read ^= entries[_home_of(_key_of(hashes[i], state), entries)]
    state[_SINK] = np.int64(read)


@inlined
def _stamp(state: Counts) -> np.uint64:
    """The generation as an entry carries it."""
    return np.uint64(np.uint64(state[GENERATION]) << _60)


# Values


@inlined
def _in_row(value: np.uint64) -> bool:
    return bool((value >> _45) & _LANE == _IN_ROW)


@inlined
def _named(value: np.uint64, word: int) -> np.uint64:
    """The holders named in `value` itself among slots 64 × `word` and up, as bits."""
    bits = _0
    for place in range(4):
        slot = (value >> np.uint64(15 * place)) & _LANE
        if slot >> _6 == np.uint64(word):  # no holder: far beyond any word
            bits |= _1 << (slot & _63)
    return np.uint64(bits)


@inlined
def _bits(rows: Rows, value: np.uint64, word: int) -> np.uint64:
    """The holders in `value` or in its row among slots 64 × `word` and up, as bits."""
    return rows[value & _ROW_MASK, word] if _in_row(value) else _named(value, word)


@inlined
def _holds(rows: Rows, value: np.uint64, slot: np.uint64) -> bool:
    if _in_row(value):
        return bool((rows[value & _ROW_MASK, slot >> _6] >> (slot & _63)) & _1)
    return bool(
        value & _LANE == slot
        or (value >> _15) & _LANE == slot
        or (value >> _30) & _LANE == slot
        or (value >> _45) & _LANE == slot
    )


@inlined
def _with_slot(rows: Rows, state: Counts, value: np.uint64, slot: np.uint64) -> np.uint64:
    """`value` with one holder more, who is none yet and not named; unchanged if that takes a row and none is free."""
    for place in range(4):
        shift = np.uint64(15 * place)
        if (value >> shift) & _LANE == _LANE:
            return np.uint64((value & ~(_LANE << shift)) | (slot << shift))
    if state[FREE_ROWS] == 0:
        return value
    row = np.uint64(state[NEXT_ROW])
    state[NEXT_ROW] = np.int64(rows[row, _0])
    state[FREE_ROWS] -= 1
    for word in range(rows.shape[1]):
        rows[row, word] = _named(value, word)
    rows[row, slot >> _6] |= _1 << (slot & _63)
    return np.uint64((value & ~_HOLDERS) | (_IN_ROW << _45) | row)


@inlined
def _release(rows: Rows, state: Counts, row: np.uint64) -> None:
    """Makes `row` the first free one."""
    for word in range(rows.shape[1]):
        rows[row, word] = _0
    rows[row, _0] = np.uint64(state[NEXT_ROW])
    state[NEXT_ROW] = np.int64(row)
    state[FREE_ROWS] += 1


@inlined
def _without_slot(rows: Rows, state: Counts, value: np.uint64, slot: np.uint64) -> np.uint64:
    """`value` with one holder less, who is one."""
    if not _in_row(value):
        for place in range(4):
            shift = np.uint64(15 * place)
            if (value >> shift) & _LANE == slot:
                return np.uint64(value | (_LANE << shift))
        return value
    row = value & _ROW_MASK
    rows[row, slot >> _6] &= ~(_1 << (slot & _63))
    left = _0
    for word in range(rows.shape[1]):
        left |= rows[row, word]
    if left:
        return value
    _release(rows, state, row)
    return np.uint64(value | _NOBODY)


@loop
def _without(rows: Rows, state: Counts, value: np.uint64, dead: Words) -> np.uint64:
    """`value` without the slots in `dead`."""
    if _in_row(value):
        row = value & _ROW_MASK
        left = _0
        for word in range(len(dead)):
            rows[row, word] &= ~dead[word]
            left |= rows[row, word]
        if left:
            return value
        _release(rows, state, row)
        return np.uint64(value | _NOBODY)
    kept = value
    for place in range(4):
        shift = np.uint64(15 * place)
        slot = (value >> shift) & _LANE
        if slot != _LANE and (dead[slot >> _6] >> (slot & _63)) & _1:
            kept |= _LANE << shift
    return np.uint64(kept)


@loop
def _evict(rows: Rows, counts: Counts, state: Counts, value: np.uint64) -> None:
    """Takes the entry with this value from all its holders. Condemned slots were taken out of the counts before."""
    for word in range(rows.shape[1]):
        bits = _bits(rows, value, word)
        while bits:
            low = bits & (~bits + _1)
            slot = 64 * word + _PLACES[(low * _DE_BRUIJN) >> _58]
            if counts[slot] > 0:
                counts[slot] -= 1
                state[EVICTED] += 1
            bits ^= low
    if _in_row(value):
        _release(rows, state, value & _ROW_MASK)


# Changes


@inlined
def _add(
    entries: Words, at: np.uint64, rows: Rows, dead: Words, counts: Counts, state: Counts, slot: np.uint64
) -> bool:
    """Adds a holder to the entry at `at`, and stamps the entry with the current generation. Returns whether only slots
    in `dead` held it, which is empty if there are none."""
    value = entries[at + _1]
    if len(dead):
        value = _without(rows, state, value, dead)
    value = (value & _HOLDERS) | _stamp(state)
    created = value & _HOLDERS == _NOBODY
    if not _holds(rows, value, slot):
        more = value
        if _in_row(value):
            rows[value & _ROW_MASK, slot >> _6] |= _1 << (slot & _63)
        else:
            more = _with_slot(rows, state, value, slot)
        taken = _in_row(value) or more != value
        counts[slot] += taken
        state[REFUSED] += not taken
        value = more
    entries[at + _1] = value
    return bool(created)


@loop
def store(
    table: Words, old: Words, rows: Rows, dead: Words, counts: Counts, state: Counts, holder: int, hashes: Words
) -> int:
    """Returns how many blocks no slot held, but for those in `dead`, which is empty if there are none."""
    slot, migrating, created = np.uint64(holder), len(old) > 2, 0
    for start in range(0, len(hashes), _GROUP):
        _touch(table, hashes, start, state)
        if migrating:
            _touch(old, hashes, start, state)
        for i in range(start, min(start + _GROUP, len(hashes))):
            key = _key_of(hashes[i], state)
            at = _seek(table, key)
            if table[at] == key:
                created += _add(table, at, rows, dead, counts, state, slot)
                continue
            if migrating:
                was = _seek(old, key)
                if old[was] == key:
                    created += _add(old, was, rows, dead, counts, state, slot)
                    continue
            if state[ROOM] <= 0:
                state[REFUSED] += 1
                continue
            table[at] = key
            table[at + _1] = (_NOBODY & ~_LANE) | slot | _stamp(state)
            counts[slot] += 1
            state[LIVE] += 1
            state[ROOM] -= 1
            created += 1
    return created


@inlined
def _take(entries: Words, at: np.uint64, rows: Rows, counts: Counts, state: Counts, slot: np.uint64) -> bool:
    """Removes a holder from the entry at `at`. Returns whether the entry is gone."""
    value = entries[at + _1]
    if not _holds(rows, value, slot):
        return False
    counts[slot] -= 1
    value = _without_slot(rows, state, value, slot)
    entries[at + _1] = value
    if value & _HOLDERS != _NOBODY:
        return False
    entries[at] = _TOMB
    state[LIVE] -= 1
    return True


@loop
def remove(table: Words, old: Words, rows: Rows, counts: Counts, state: Counts, holder: int, hashes: Words) -> None:
    slot, migrating = np.uint64(holder), len(old) > 2
    for start in range(0, len(hashes), _GROUP):
        _touch(table, hashes, start, state)
        if migrating:
            _touch(old, hashes, start, state)
        for i in range(start, min(start + _GROUP, len(hashes))):
            key = _key_of(hashes[i], state)
            at = _seek(table, key)
            if table[at] == key:
                gone = _take(table, at, rows, counts, state, slot)
                after = at + _2 if at + _2 < np.uint64(len(table)) else _0
                if gone and table[after] == _EMPTY:  # nothing was put behind it
                    table[at] = _EMPTY
                    state[ROOM] += 1
            elif migrating:
                was = _seek(old, key)
                if old[was] == key and _take(old, was, rows, counts, state, slot):
                    state[ROOM] += 1


# Migration


@inlined
def _gather(old: Words, state: Counts, start: int, end: int) -> int:
    """Puts the places that have entries into the scratch space; returns how many. (A branch would be mispredicted half
    the time.)"""
    found = 0
    for at in range(start, end, 2):
        state[_SCRATCH + found] = at
        found += old[at] > _TOMB
    return found


@loop
def migrate(
    table: Words, old: Words, rows: Rows, dead: Words, counts: Counts, state: Counts, kept: int, steps: int
) -> bool:
    """Migrates `steps` more places; returns whether the migration is complete.

    Entries that only slots in `dead` hold are left out, and entries older than `kept` generations.
    """
    stamp, end = _stamp(state), min(state[CURSOR] + 2 * steps, len(old))
    nobody_dies = True
    for word in range(len(dead)):
        nobody_dies &= dead[word] == _0
    for start in range(state[CURSOR], end, 2 * _GROUP):
        for found in range(_gather(old, state, start, min(start + 2 * _GROUP, end))):
            at = np.uint64(state[_SCRATCH + found])
            key, value = old[at], old[at + _1]
            old[at] = _TOMB
            age = (stamp - (value & ~_HOLDERS)) >> _60
            if age > _MAX_AGE:  # bounded here, so that ages do not come round (an entry would only be kept for longer)
                value = (value & _HOLDERS) | (stamp - (_MAX_AGE << _60))
            if age > np.uint64(kept):
                _evict(rows, counts, state, value)
                value |= _NOBODY
            if not nobody_dies:
                value = _without(rows, state, value, dead)
            if value & _HOLDERS == _NOBODY:
                state[LIVE] -= 1
                state[ROOM] += 1
            else:
                to = _seek(table, key)
                table[to] = key
                table[to + _1] = value
    state[CURSOR] = end
    return bool(end == len(old))


# Look-ups


@inlined
def _look(entries: Words, key: np.uint64, stamp: np.uint64) -> np.uint64:
    """The holders of `key`, whose entry is stamped anew; `_NOBODY` if it is not there."""
    at = _seek(entries, key)
    holders = _NOBODY
    if entries[at] == key:
        value = entries[at + _1]
        holders = value & _HOLDERS
        if value != holders | stamp:
            entries[at + _1] = holders | stamp
    return holders


@inlined
def _note(bits: np.uint64, word: int, depth: int, depths: Depths) -> None:
    """Writes `depth` for each slot among `bits`, which are those of 64 × `word` and up."""
    while bits:
        low = bits & (~bits + _1)
        depths[64 * word + _PLACES[(low * _DE_BRUIJN) >> _58]] = depth
        bits ^= low


@inlined
def _look_up(table: Words, old: Words, state: Counts, hashes: Words, start: int) -> int:
    """Puts the holders of a group of blocks, up to the first that nobody holds, into the scratch space; returns of how
    many blocks."""
    stamp, migrating, found = _stamp(state), len(old) > 2, 0
    _touch(table, hashes, start, state)
    for i in range(start, min(start + _GROUP, len(hashes))):
        key = _key_of(hashes[i], state)
        holders = _look(table, key, stamp)
        if migrating and holders == _NOBODY:
            holders = _look(old, key, stamp)
        state[_SCRATCH + found] = np.int64(holders)
        found += 1
        if holders == _NOBODY:
            break
    return found


@inlined
def _all_hold(rows: Rows, state: Counts, found: int, alive: np.uint64, word: int) -> bool:
    """Whether all who are alive hold the whole group; False as well if it takes a closer look to tell."""
    kept, in_rows = alive, True
    for i in range(found):
        holders = np.uint64(state[_SCRATCH + i])
        in_rows &= _in_row(holders)
        kept &= rows[holders & _ROW_MASK if in_rows else _0, word]
    return in_rows and bool(kept == alive)


@inlined
def _narrow(
    rows: Rows, state: Counts, found: int, alive: np.uint64, word: int, start: int, depths: Depths
) -> np.uint64:
    """Who of `alive` hold the whole group, and into `depths` how far the others got."""
    last = _NOTHING
    for i in range(found):
        holders = np.uint64(state[_SCRATCH + i])
        if holders == last:
            continue  # the same few as of the block before
        last = holders
        gone = alive & ~_bits(rows, holders, word)
        if gone:
            alive ^= gone
            _note(gone, word, start + i, depths)
    return alive


@loop
def walk(table: Words, old: Words, rows: Rows, state: Counts, slots: Rows, hashes: Words, depths: Depths) -> int:
    """Into `depths`: how many of the leading `hashes` each live slot holds; returns the most that one does."""
    words = np.uint64(slots.shape[1])
    for word in range(words):
        slots[_ALIVE, word] = slots[_LIVE, word]
    for start in range(0, len(hashes), _GROUP):
        found, left = _look_up(table, old, state, hashes, start), _0
        for word in range(words):
            alive = slots[_ALIVE, word]
            if alive and not _all_hold(rows, state, found, alive, word):
                alive = _narrow(rows, state, found, alive, word, start, depths)
                slots[_ALIVE, word] = alive
            left |= alive
        if not left:
            break
    for word in range(words):
        _note(slots[_ALIVE, word], word, len(hashes), depths)
    deepest = 0
    for depth in depths:
        deepest = max(deepest, depth)
    return deepest


@loop
def mark(table: Words, old: Words, rows: Rows, state: Counts, hashes: Words, masks: Rows) -> None:
    """Adds each block's holders to its row of `masks`."""
    stamp, migrating = _stamp(state), len(old) > 2
    for i in range(len(hashes)):
        key = _key_of(hashes[i], state)
        holders = _look(table, key, stamp)
        if migrating and holders == _NOBODY:
            holders = _look(old, key, stamp)
        for word in range(masks.shape[1]):
            masks[i, word] |= _bits(rows, holders, word)


@loop
def walk_masks(slots: Rows, masks: Rows, depths: Depths) -> None:
    """Like `walk`, over holders that `mark` has gathered."""
    words = slots.shape[1]
    for word in range(words):
        slots[_ALIVE, word] = slots[_LIVE, word]
    for depth in range(len(masks)):
        left = _0
        for word in range(words):
            gone = slots[_ALIVE, word] & ~masks[depth, word]
            _note(gone, word, depth, depths)
            slots[_ALIVE, word] ^= gone
            left |= slots[_ALIVE, word]
        if not left:
            return
    for word in range(words):
        _note(slots[_ALIVE, word], word, len(masks), depths)


@loop
def go_back(masks: Rows, bound: Counts, window: int, depths: Depths) -> bool:
    """Shortens the `depths` of the `bound` slots to where each holds, by `masks`, as many blocks before as `window`, or
    all; whether any was shortened."""
    shortened = False
    for slot in bound:
        word, bit = slot >> 6, np.uint64(slot & 63)
        end = at = np.int64(depths[slot])
        while at > 0 and end - at < window:
            at -= 1
            if not (masks[at, word] >> bit) & _1:
                end = at
        if end < depths[slot]:
            depths[slot] = end
            shortened = True
    return shortened


@loop
def read_holders(entries: Words, rows: Rows, masks: Rows) -> None:
    """Writes each place's holders into its row of `masks`. That does not count as a use of the entry."""
    for place in range(len(masks)):
        if entries[2 * place] > _TOMB:
            for word in range(masks.shape[1]):
                masks[place, word] = _bits(rows, entries[2 * place + 1], word)


def blocks_in(entries: Words, secret: int) -> Words:
    """A sequence hash for each place in a table; where nothing is there, none that anyone asks for."""
    keys = entries[::2] * np.uint64(pow(secret | 1, -1, 1 << 64))
    return np.asarray(((keys ^ (keys >> _32)) * _GATHER) ^ np.uint64(secret))
