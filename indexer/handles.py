"""One engine rank's blocks: from the engine's opaque hashes to the router's sequence hashes.

Engines name parents and removals by their own hashes, so the sequence hash of each has to be remembered. An engine may
hold several copies of a block (a hash that was stored twice must be removed twice), hence the counts. Both tables are
packed arrays with open addressing, linear probing and compiled loops (docs/adr/0004-compiled-kernels.md). Removal
closes the gap at once, so only growth moves all entries.
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
"""A row per place: the key, the copies in each tier, and in the table of names also the sequence hash."""

Size: TypeAlias = npt.NDArray[np.int64]
"""The number of names, where kernels can change it; and a scratch element."""

_SMALLEST = 1024
_FULLEST = 0.6
_FRESH = 0.35

_MASK = (1 << 64) - 1
_EMPTY = np.uint64(0)
_SALT = np.uint64(0x9E3779B97F4A7C15)  # turns names into keys, so that no likely name looks like an empty place
_MIX = np.uint64(0xD6E8FEB86659FD93)
_1, _32 = np.uint64(1), np.uint64(32)

# Columns of a table.
_KEY, _COPIES, _HASH = 0, 1, 2

_BITS = 21
"""Bits of each tier's count of copies: up to two million copies of one block, where engines have a handful."""

_OF_TIER = np.uint64((1 << _BITS) - 1)


class UnknownParent(Exception):
    """A store names a parent that was never seen, so its prefix is unknown and the blocks cannot be placed."""


def block_name(engine_hash: EngineHash) -> int:
    """An engine hash in 64 bits. Integers of that size, signed or unsigned, are used as they are.

    Anything longer is hashed, so two blocks share a name with a chance of 2^-64, like sequence hashes. A rank that
    holds such a pair has one of them indexed wrongly, which can misroute a request and nothing else.
    """
    if isinstance(engine_hash, int):
        if engine_hash.bit_length() <= 64:
            return engine_hash & _MASK
        engine_hash = str(engine_hash).encode()
    return xxhash.xxh3_64_intdigest(engine_hash)


def block_names(engine_hashes: Sequence[EngineHash] | BlockNames) -> BlockNames:
    """As an array. Raises TypeError for anything that is not a hash."""
    if isinstance(engine_hashes, np.ndarray):
        return engine_hashes
    return np.fromiter(map(block_name, engine_hashes), np.uint64, len(engine_hashes))


class BlockHandles:
    """Not thread-safe. Every method succeeds or changes nothing."""

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
        """Record contiguous blocks. Returns the sequence hashes that `tier` did not hold before, in order.

        `root` seeds the chain if `parent` is None. Raises UnknownParent, ValueError if the numbers of tokens and hashes
        do not match, and OverflowError or TypeError for anything that is not a token id or a hash.
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
        """Drop one copy of each. Returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes.

        Raises TypeError for anything that is not a hash.
        """
        names = block_names(engine_hashes)
        gone = np.empty(len(names), np.uint64)
        return gone[: _remove(self._names, self._held, self._size, int(tier), names, gone)]

    def find(self, engine_hashes: Sequence[EngineHash] | BlockNames) -> tuple[BlockNames, SequenceHashes]:
        """The names of those that are held in any tier, and their sequence hashes. Raises TypeError for anything that
        is not a hash."""
        names = block_names(engine_hashes).copy()
        hashes = np.empty(len(names), np.uint64)
        known = _find(self._names, names, hashes)
        return names[:known], hashes[:known]

    def adopt(self, tier: Tier, names: BlockNames, hashes: SequenceHashes) -> SequenceHashes:
        """`store` for blocks that another `BlockHandles` knows, as its `find` returned them."""
        self._make_room(len(names))
        hashes = hashes.copy()
        return hashes[: _store(self._names, self._held, self._size, int(tier), names, hashes)]

    def holding(self, hashes: SequenceHashes) -> SequenceHashes:
        """Those of `hashes` that are held in any tier."""
        kept = hashes.copy()
        return kept[: _keep_held(self._held, kept)]

    def clear(self) -> None:
        # Pages of zeros take no memory until they are written to.
        self._names = np.zeros((_SMALLEST, 3), np.uint64)
        self._held = np.zeros((_SMALLEST, 2), np.uint64)
        self._size = np.zeros(2, np.int64)

    def held(self) -> dict[Tier, SequenceHashes]:
        """Everything held, by tier, in no particular order: the content of a snapshot."""
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
        wanted = len(self) + blocks  # at least as many as sequence hashes
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
    """Empties a place, and moves entries behind it up that probing would not find any more."""
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
    """Returns whether that was the last copy in any tier; then the entry is removed."""
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
    """How many of `names` are known. These are moved to its beginning, and their sequence hashes into `hashes`."""
    found = 0
    for i in range(len(names)):
        at = _place(table, _key(names[i]))
        if table[at, _KEY] != _EMPTY:
            names[found], hashes[found] = names[i], table[at, _HASH]
            found += 1
    return found


@loop
def _keep_held(held: Table, hashes: SequenceHashes) -> int:
    """How many of `hashes` are held. These are moved to its beginning."""
    kept = 0
    for i in range(len(hashes)):
        key = _key(hashes[i])
        if held[_place(held, key), _KEY] == key:
            hashes[kept] = hashes[i]
            kept += 1
    return kept


@loop
def _touch(table: Table, names: BlockNames, size: Size) -> None:
    """Touches all places first, so that their cache misses overlap: big tables are in no cache."""
    mask = len(table) - 1
    seen = _EMPTY
    for name in names:
        seen ^= table[_home(_key(name), mask), _KEY]
    size[1] = np.int64(seen)  # so that the reads are not optimised away


@loop
def _store(table: Table, held: Table, size: Size, tier: int, names: BlockNames, hashes: SequenceHashes) -> int:
    """How many of `hashes` are new in `tier`. These are moved to its beginning."""
    shift = np.uint64(_BITS * tier)
    _touch(table, names, size)
    _touch(held, hashes, size)
    new = 0
    for i in range(len(names)):
        key = _key(names[i])
        at = _place(table, key)
        if table[at, _KEY] == _EMPTY:
            # The first sequence hash stays: an engine hash keeps its tokens while a copy exists.
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
    """How many are gone from `tier`. Their sequence hashes are written to `gone`."""
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
