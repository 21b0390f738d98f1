"""The compiled loops of `handles.BlockHandles`, over packed tables with open addressing and linear probing
(docs/adr/0004-compiled-kernels.md). Removal closes the gap at once, so only growth moves all entries."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.jit import loop

Words: TypeAlias = npt.NDArray[np.uint64]
"""Names of blocks, or sequence hashes."""

Table: TypeAlias = npt.NDArray[np.uint64]
"""A row per place: the key, the copies in each tier, and in the table of names also the sequence hash."""

Size: TypeAlias = npt.NDArray[np.int64]
"""The number of names, where kernels can change it; a scratch element; the secret."""

BITS = 21
"""Bits of each tier's count of copies: up to two million copies of one block, where engines have a handful."""

SECRET = 2
"""Index into `Size`. Without it clients could have thousands of blocks in one place (`indexer.kernels._key_of`)."""

# Columns of a table.
KEY, COPIES, HASH = 0, 1, 2

OF_TIER = np.uint64((1 << BITS) - 1)
_EMPTY = np.uint64(0)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_UNMIX = np.uint64(0xCFEE444D8B59A89B)  # its inverse modulo 2^64
_1, _32 = np.uint64(1), np.uint64(32)


@loop
def _key(name: np.uint64, size: Size) -> np.uint64:
    """Of a name or a sequence hash: see `indexer.kernels._key_of`. Two names share a key where one would look like an
    empty place."""
    secret = np.uint64(size[SECRET])
    key = (name ^ secret) * _MIX
    key = (key ^ (key >> _32)) * (secret | _1)
    return key if key != _EMPTY else _1


def names_of(keys: Words, secret: int) -> Words:
    """What `_key` made them of."""
    keys = keys * np.uint64(pow(secret | 1, -1, 1 << 64))
    return np.asarray(((keys ^ (keys >> _32)) * _UNMIX) ^ np.uint64(secret))


@loop
def _home(key: np.uint64, mask: int) -> int:
    """By the highest bits, as only these depend on all bits of the name and of the secret."""
    return int(np.int64(((key >> _32) * np.uint64(mask + 1)) >> _32))


@loop
def _place(table: Table, key: np.uint64) -> int:
    """Where `key` is, or the empty place where it belongs."""
    mask = len(table) - 1
    at = _home(key, mask)
    while table[at, KEY] != key and table[at, KEY] != _EMPTY:
        at = (at + 1) & mask
    return at


@loop
def _close_up(table: Table, hole: int) -> None:
    """Empties a place, and moves entries behind it up that probing would not find any more."""
    mask = len(table) - 1
    at = (hole + 1) & mask
    while table[at, KEY] != _EMPTY:
        if (at - _home(table[at, KEY], mask)) & mask >= (at - hole) & mask:
            for column in range(table.shape[1]):
                table[hole, column] = table[at, column]
            hole = at
        at = (at + 1) & mask
    table[hole, KEY] = table[hole, COPIES] = _EMPTY


@loop
def _drop_copy(table: Table, at: int, one: np.uint64) -> bool:
    """Returns whether that was the last copy in any tier; then the entry is removed."""
    table[at, COPIES] -= one
    if table[at, COPIES]:
        return False
    _close_up(table, at)
    return True


@loop
def look_up(table: Table, size: Size, name: np.uint64) -> tuple[bool, np.uint64]:
    at = _place(table, _key(name, size))
    return table[at, KEY] != _EMPTY, table[at, HASH]


@loop
def find(table: Table, size: Size, names: Words, hashes: Words) -> int:
    """How many of `names` are known. These are moved to its beginning, and their sequence hashes into `hashes`."""
    found = 0
    for i in range(len(names)):
        at = _place(table, _key(names[i], size))
        if table[at, KEY] != _EMPTY:
            names[found], hashes[found] = names[i], table[at, HASH]
            found += 1
    return found


@loop
def keep_held(held: Table, size: Size, hashes: Words) -> int:
    """How many of `hashes` are held. These are moved to its beginning."""
    kept = 0
    for i in range(len(hashes)):
        key = _key(hashes[i], size)
        if held[_place(held, key), KEY] == key:
            hashes[kept] = hashes[i]
            kept += 1
    return kept


@loop
def _touch(table: Table, names: Words, size: Size) -> None:
    """Touches all places first, so that their cache misses overlap: big tables are in no cache."""
    mask = len(table) - 1
    seen = _EMPTY
    for name in names:
        seen ^= table[_home(_key(name, size), mask), KEY]
    size[1] = np.int64(seen)  # so that the reads are not optimised away


@loop
def store(table: Table, held: Table, size: Size, tier: int, names: Words, hashes: Words, once: bool) -> int:
    """How many of `hashes` are new in `tier`. These are moved to its beginning. `once`: see `BlockHandles.store`."""
    shift = np.uint64(BITS * tier)
    _touch(table, names, size)
    _touch(held, hashes, size)
    new = 0
    for i in range(len(names)):
        key = _key(names[i], size)
        at = _place(table, key)
        if once and (table[at, COPIES] >> shift) & OF_TIER:
            continue
        if table[at, KEY] == _EMPTY:
            # The first sequence hash stays: an engine hash keeps its tokens while a copy exists.
            table[at, KEY], table[at, HASH] = key, hashes[i]
            size[0] += 1
        table[at, COPIES] += _1 << shift
        sequence_hash = table[at, HASH]
        key = _key(sequence_hash, size)
        at = _place(held, key)
        held[at, KEY] = key
        if not (held[at, COPIES] >> shift) & OF_TIER:
            hashes[new] = sequence_hash
            new += 1
        held[at, COPIES] += _1 << shift
    return new


@loop
def remove(table: Table, held: Table, size: Size, tier: int, names: Words, gone: Words) -> int:
    """How many are gone from `tier`. Their sequence hashes are written to `gone`."""
    shift = np.uint64(BITS * tier)
    _touch(table, names, size)
    for i in range(len(names)):
        gone[i] = table[_place(table, _key(names[i], size)), HASH]
    _touch(held, gone, size)
    count = 0
    for i in range(len(names)):
        at = _place(table, _key(names[i], size))
        if not (table[at, COPIES] >> shift) & OF_TIER:
            continue
        sequence_hash = table[at, HASH]
        size[0] -= _drop_copy(table, at, _1 << shift)
        at = _place(held, _key(sequence_hash, size))
        if (held[at, COPIES] >> shift) & OF_TIER == _1:
            gone[count] = sequence_hash
            count += 1
        _drop_copy(held, at, _1 << shift)
    return count


@loop
def refill(table: Table, larger: Table) -> None:
    for at in range(len(table)):
        if table[at, KEY] != _EMPTY:
            to = _place(larger, table[at, KEY])
            for column in range(table.shape[1]):
                larger[to, column] = table[at, column]
