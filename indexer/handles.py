"""One engine rank's blocks: its opaque hashes on one side, our sequence hashes on the other.

Engines name a parent and a removal by their own hash alone, so somebody must remember which sequence hash that was. An
engine may hold several copies of one block (a hash stored twice must be removed twice), hence the counts. Both tables
are packed arrays with compiled loops, open addressing and linear probing (docs/adr/0004-compiled-kernels.md); a removed
entry's place is closed up at once, so nothing but growth ever moves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from indexer.hashing import SequenceHashes, Tokens, chain_hashes, pack_tokens
from indexer.jit import loop
from indexer.types import EngineHash, SequenceHash, Tier

BlockNames: TypeAlias = npt.NDArray[np.uint64]
"""Engine hashes in 64 bits, as `block_names` makes them."""

Table: TypeAlias = npt.NDArray[np.uint64]
"""A row for each place: a key, how many copies each tier has, and of names also the sequence hash that goes by them."""

Size: TypeAlias = npt.NDArray[np.int64]
"""How many names there are, where kernels can change it; and something to write to."""

_SMALLEST = 1024
_FULLEST = 0.6
_FRESH = 0.35

_MASK = (1 << 64) - 1
_EMPTY = np.uint64(0)
_SALT = np.uint64(0x9E3779B97F4A7C15)  # makes keys of names, so that the mark for emptiness stands for nobody's name
_MIX = np.uint64(0xD6E8FEB86659FD93)
_1, _32 = np.uint64(1), np.uint64(32)

# Columns of a table.
_KEY, _COPIES, _HASH = 0, 1, 2

_BITS = 21
"""Of a tier's part in a number of copies: two million of one block, where an engine has a handful."""

_OF_TIER = np.uint64((1 << _BITS) - 1)


class UnknownParent(Exception):
    """A store names a parent that was never seen: the prefix before it is unknown, so the blocks cannot be placed."""


def block_name(engine_hash: EngineHash) -> int:
    """An engine hash in 64 bits. Numbers of that size, signed or not, are taken as they are.

    Anything longer is hashed, so two blocks share a name with a chance of 2^-64, as sequence hashes do; a rank that
    happens to hold such a pair has one of them indexed wrongly, which can misroute and nothing else.
    """
    if isinstance(engine_hash, int):
        if engine_hash.bit_length() <= 64:
            return engine_hash & _MASK
        engine_hash = str(engine_hash).encode()
    return xxhash.xxh3_64_intdigest(engine_hash)


def block_names(engine_hashes: Sequence[EngineHash] | BlockNames) -> BlockNames:
    """As an array. Raises TypeError for what is no hash."""
    if isinstance(engine_hashes, np.ndarray):
        return engine_hashes
    return np.fromiter(map(block_name, engine_hashes), np.uint64, len(engine_hashes))


class BlockHandles:
    """Not thread-safe; every method is all or nothing."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return int(self._size[0])

    def store(
        self,
        tier: Tier,
        engine_hashes: Sequence[EngineHash] | BlockNames,
        parent: EngineHash | None,
        token_ids: Sequence[int] | Tokens,
        block_size: int,
        root: SequenceHash,
        extras: Sequence[bytes] = (),
    ) -> SequenceHashes:
        """Record contiguous blocks; returns the sequence hashes that `tier` did not hold before, in order.

        `root` seeds the chain when `parent` is None. Raises UnknownParent, ValueError when tokens and hashes do not
        agree in number, OverflowError or TypeError for what is no token id or no hash.
        """
        blocks = len(engine_hashes)
        if len(token_ids) != blocks * block_size:
            raise ValueError(f"{len(token_ids)} tokens for {blocks} blocks of {block_size}")
        if parent is not None:
            root = self._sequence_hash(parent)
        names = block_names(engine_hashes)
        hashes = chain_hashes(pack_tokens(token_ids), block_size, root, extras)
        self._make_room(blocks)
        new = _store(self._names, self._held, self._size, int(tier), names, hashes)
        return hashes[:new]

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash] | BlockNames) -> SequenceHashes:
        """Drop one copy of each; returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes.

        Raises TypeError for what is no hash.
        """
        names = block_names(engine_hashes)
        gone = np.empty(len(names), np.uint64)
        return gone[: _remove(self._names, self._held, self._size, int(tier), names, gone)]

    def find(self, engine_hashes: Sequence[EngineHash] | BlockNames) -> tuple[BlockNames, SequenceHashes]:
        """Those of them that are held in any tier, and their sequence hashes. Raises TypeError for what is no hash."""
        names = block_names(engine_hashes).copy()
        hashes = np.empty(len(names), np.uint64)
        known = _find(self._names, names, hashes)
        return names[:known], hashes[:known]

    def adopt(self, tier: Tier, names: BlockNames, hashes: SequenceHashes) -> SequenceHashes:
        """`store`, of blocks that are known by another's handles, as its `find` says."""
        self._make_room(len(names))
        hashes = hashes.copy()
        return hashes[: _store(self._names, self._held, self._size, int(tier), names, hashes)]

    def holding(self, hashes: SequenceHashes) -> SequenceHashes:
        """Those of `hashes` that are held in any tier."""
        kept = hashes.copy()
        return kept[: _keep_held(self._held, kept)]

    def clear(self) -> None:
        # Untouched pages of zeros cost no memory yet.
        self._names = np.zeros((_SMALLEST, 3), np.uint64)
        self._held = np.zeros((_SMALLEST, 2), np.uint64)
        self._size = np.zeros(2, np.int64)

    def held(self) -> dict[Tier, SequenceHashes]:
        """Everything held, by tier, in no order: what a snapshot says."""
        found = {}
        for tier in Tier:
            keys = self._held[(self._held[:, _COPIES] >> np.uint64(_BITS * tier)) & _OF_TIER > 0, _KEY]
            if len(keys):
                found[tier] = keys ^ _SALT
        return found

    def _sequence_hash(self, parent: EngineHash) -> SequenceHash:
        found, sequence_hash = _look_up(self._names, np.uint64(block_name(parent)))
        if not found:
            raise UnknownParent
        return int(sequence_hash)

    def _make_room(self, blocks: int) -> None:
        wanted = len(self) + blocks  # never fewer than there are sequence hashes
        if wanted > _FULLEST * len(self._names):
            self._names, self._held = _larger(self._names, wanted), _larger(self._held, wanted)


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after."""
    handles = BlockHandles()
    handles.store(Tier.GPU, [1], None, [0], 1, 0)
    handles.store(Tier.GPU, [2], 1, [0], 1, 0)
    handles.remove(Tier.GPU, [2])
    names, hashes = handles.find([1])
    handles.holding(handles.adopt(Tier.GPU, names, hashes))
    _larger(np.zeros((1, 2), np.uint64), 1)


def _larger(table: Table, entries: int) -> Table:
    places = len(table)
    while entries > _FRESH * places:
        places *= 2
    larger = np.zeros((places, table.shape[1]), np.uint64)
    _refill(table, larger)
    return larger


@loop
def _key(name: np.uint64) -> np.uint64:
    key = name ^ _SALT
    return key if key != _EMPTY else _1


@loop
def _home(key: np.uint64, mask: int) -> int:
    return int(np.int64((key * _MIX) >> _32)) & mask


@loop
def _place(table: Table, key: np.uint64) -> int:
    """Where `key` is, or the empty place where it belongs."""
    mask = len(table) - 1
    at = _home(key, mask)
    while table[at, _KEY] != key and table[at, _KEY] != _EMPTY:
        at = (at + 1) & mask
    return at


@loop
def _close_up(table: Table, hole: int) -> None:
    """Empties a place; entries behind it that it kept from theirs move up."""
    mask = len(table) - 1
    at = (hole + 1) & mask
    while table[at, _KEY] != _EMPTY:
        if (at - _home(table[at, _KEY], mask)) & mask >= (at - hole) & mask:
            for column in range(table.shape[1]):
                table[hole, column] = table[at, column]
            hole = at
        at = (at + 1) & mask
    table[hole, _KEY] = table[hole, _COPIES] = _EMPTY


@loop
def _drop_copy(table: Table, at: int, one: np.uint64) -> bool:
    """Whether that was the last one, in any tier; then the entry is gone."""
    table[at, _COPIES] -= one
    if table[at, _COPIES]:
        return False
    _close_up(table, at)
    return True


@loop
def _look_up(table: Table, name: np.uint64) -> tuple[bool, np.uint64]:
    at = _place(table, _key(name))
    return table[at, _KEY] != _EMPTY, table[at, _HASH]


@loop
def _find(table: Table, names: BlockNames, hashes: SequenceHashes) -> int:
    """How many of `names` there are; these are then at its beginning, and in `hashes` what goes by them."""
    found = 0
    for i in range(len(names)):
        at = _place(table, _key(names[i]))
        if table[at, _KEY] != _EMPTY:
            names[found], hashes[found] = names[i], table[at, _HASH]
            found += 1
    return found


@loop
def _keep_held(held: Table, hashes: SequenceHashes) -> int:
    """How many of `hashes` are held; these are then at its beginning."""
    kept = 0
    for i in range(len(hashes)):
        key = _key(hashes[i])
        if held[_place(held, key), _KEY] == key:
            hashes[kept] = hashes[i]
            kept += 1
    return kept


@loop
def _touch(table: Table, names: BlockNames, size: Size) -> None:
    """Waits for the places of all of them at once, not for one after the other: big tables are in no cache."""
    mask = len(table) - 1
    seen = _EMPTY
    for name in names:
        seen ^= table[_home(_key(name), mask), _KEY]
    size[1] = np.int64(seen)  # so that it is not left out


@loop
def _store(table: Table, held: Table, size: Size, tier: int, names: BlockNames, hashes: SequenceHashes) -> int:
    """How many of `hashes` are new in `tier`; these are then at its beginning."""
    shift = np.uint64(_BITS * tier)
    _touch(table, names, size)
    _touch(held, hashes, size)
    new = 0
    for i in range(len(names)):
        key = _key(names[i])
        at = _place(table, key)
        if table[at, _KEY] == _EMPTY:
            # The first meaning stays: an engine hash cannot change its tokens while a copy exists.
            table[at, _KEY], table[at, _HASH] = key, hashes[i]
            size[0] += 1
        table[at, _COPIES] += _1 << shift
        sequence_hash = table[at, _HASH]
        key = _key(sequence_hash)
        at = _place(held, key)
        held[at, _KEY] = key
        if not (held[at, _COPIES] >> shift) & _OF_TIER:
            hashes[new] = sequence_hash
            new += 1
        held[at, _COPIES] += _1 << shift
    return new


@loop
def _remove(table: Table, held: Table, size: Size, tier: int, names: BlockNames, gone: SequenceHashes) -> int:
    """How many are gone from `tier`: their sequence hashes go to `gone`."""
    shift = np.uint64(_BITS * tier)
    _touch(table, names, size)
    for i in range(len(names)):
        gone[i] = table[_place(table, _key(names[i])), _HASH]
    _touch(held, gone, size)
    count = 0
    for i in range(len(names)):
        at = _place(table, _key(names[i]))
        if not (table[at, _COPIES] >> shift) & _OF_TIER:
            continue
        sequence_hash = table[at, _HASH]
        size[0] -= _drop_copy(table, at, _1 << shift)
        at = _place(held, _key(sequence_hash))
        if (held[at, _COPIES] >> shift) & _OF_TIER == _1:
            gone[count] = sequence_hash
            count += 1
        _drop_copy(held, at, _1 << shift)
    return count


@loop
def _refill(table: Table, larger: Table) -> None:
    for at in range(len(table)):
        if table[at, _KEY] != _EMPTY:
            to = _place(larger, table[at, _KEY])
            for column in range(table.shape[1]):
                larger[to, column] = table[at, column]
