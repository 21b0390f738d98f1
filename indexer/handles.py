"""One engine rank's blocks: its opaque hashes on one side, our sequence hashes on the other.

Engines name a parent and a removal by their own hash alone, so somebody must remember which sequence hash that was. An
engine may hold several copies of one block (a hash stored twice must be removed twice), hence the counts. Both tables
are packed arrays with compiled loops, open addressing and linear probing (docs/adr/0004-compiled-kernels.md); a removed
entry's place is closed up at once, so nothing but growth ever moves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from indexer.hashing import SequenceHashes, Tokens, chain_hashes, pack_tokens
from indexer.jit import kernel
from indexer.types import EngineHash, SequenceHash, Tier

BlockNames: TypeAlias = npt.NDArray[np.uint64]
"""Engine hashes in 64 bits, as `block_names` makes them."""

Copies: TypeAlias = npt.NDArray[np.uint32]
"""How many copies each tier has, by place in a table."""

Size: TypeAlias = npt.NDArray[np.int64]
"""One number, how many names there are, where kernels can change it."""

_SMALLEST = 1024
_FULLEST = 0.6
_FRESH = 0.35

_MASK = (1 << 64) - 1
_EMPTY = np.uint64(0)
_SALT = np.uint64(0x9E3779B97F4A7C15)  # makes keys of names, so that the mark for emptiness stands for nobody's name
_MIX = np.uint64(0xD6E8FEB86659FD93)
_1, _32 = np.uint64(1), np.uint64(32)


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


class _Table(NamedTuple):
    keys: BlockNames
    values: SequenceHashes
    """The sequence hash that goes by each key."""
    copies: Copies


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
        new = _store(*self._names, *self._held, self._size, int(tier), names, hashes)
        return hashes[:new]

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash] | BlockNames) -> SequenceHashes:
        """Drop one copy of each; returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes.

        Raises TypeError for what is no hash.
        """
        names = block_names(engine_hashes)
        gone = np.empty(len(names), np.uint64)
        return gone[: _remove(*self._names, *self._held, self._size, int(tier), names, gone)]

    def clear(self) -> None:
        self._names = _fresh(_SMALLEST)
        self._held = _fresh(_SMALLEST)
        self._size = np.zeros(1, np.int64)

    def held(self) -> dict[Tier, SequenceHashes]:
        """Everything held, by tier, in no order: what a snapshot says."""
        _, hashes, copies = self._held
        return {tier: hashes[copies[:, tier] > 0] for tier in Tier if copies[:, tier].any()}

    def _sequence_hash(self, parent: EngineHash) -> SequenceHash:
        found, sequence_hash = _look_up(self._names.keys, self._names.values, np.uint64(block_name(parent)))
        if not found:
            raise UnknownParent
        return int(sequence_hash)

    def _make_room(self, blocks: int) -> None:
        wanted = len(self) + blocks  # never fewer than there are sequence hashes
        if wanted > _FULLEST * len(self._names.keys):
            self._names, self._held = _larger(self._names, wanted), _larger(self._held, wanted)


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after."""
    handles = BlockHandles()
    handles.store(Tier.GPU, [1], None, [0], 1, 0)
    handles.store(Tier.GPU, [2], 1, [0], 1, 0)
    handles.remove(Tier.GPU, [2])
    _larger(_fresh(_SMALLEST), 2)


def _fresh(places: int) -> _Table:
    """Untouched pages of zeros cost no memory yet."""
    return _Table(np.zeros(places, np.uint64), np.zeros(places, np.uint64), np.zeros((places, len(Tier)), np.uint32))


def _larger(table: _Table, entries: int) -> _Table:
    places = len(table.keys)
    while entries > _FRESH * places:
        places *= 2
    larger = _fresh(places)
    _refill(*table, *larger)
    return larger


@kernel
def _key(name: np.uint64) -> np.uint64:
    key = name ^ _SALT
    return key if key != _EMPTY else _1


@kernel
def _place(keys: BlockNames, key: np.uint64) -> np.int64:
    """Where `key` is, or the empty place where it belongs."""
    mask = np.uint64(len(keys) - 1)
    at = ((key * _MIX) >> _32) & mask
    while keys[at] != key and keys[at] != _EMPTY:
        at = (at + _1) & mask
    return np.int64(at)


@kernel
def _close_up(keys: BlockNames, values: SequenceHashes, copies: Copies, hole: np.int64) -> None:
    """Empties a place; entries behind it that it kept from theirs move up."""
    mask = len(keys) - 1
    at = (hole + 1) & mask
    while keys[at] != _EMPTY:
        home = np.int64((keys[at] * _MIX) >> _32) & mask
        if (at - home) & mask >= (at - hole) & mask:
            keys[hole], values[hole] = keys[at], values[at]
            for tier in range(copies.shape[1]):
                copies[hole, tier] = copies[at, tier]
            hole = at
        at = (at + 1) & mask
    keys[hole] = _EMPTY
    for tier in range(copies.shape[1]):
        copies[hole, tier] = np.uint32(0)


@kernel
def _drop_copy(keys: BlockNames, values: SequenceHashes, copies: Copies, at: np.int64, tier: int) -> bool:
    """Whether that was the last one, in any tier; then the entry is gone."""
    copies[at, tier] -= np.uint32(1)
    for other in range(copies.shape[1]):
        if copies[at, other]:
            return False
    _close_up(keys, values, copies, at)
    return True


@kernel
def _look_up(keys: BlockNames, values: SequenceHashes, name: np.uint64) -> tuple[bool, np.uint64]:
    at = _place(keys, _key(name))
    return keys[at] != _EMPTY, values[at]


@kernel
def _store(
    keys: BlockNames,
    values: SequenceHashes,
    copies: Copies,
    held_keys: SequenceHashes,
    held_values: SequenceHashes,
    held_copies: Copies,
    size: Size,
    tier: int,
    names: BlockNames,
    hashes: SequenceHashes,
) -> int:
    """How many of `hashes` are new in `tier`; these are then at its beginning."""
    new = 0
    for i in range(len(names)):
        key = _key(names[i])
        at = _place(keys, key)
        if keys[at] == _EMPTY:
            # The first meaning stays: an engine hash cannot change its tokens while a copy exists.
            keys[at], values[at] = key, hashes[i]
            size[0] += 1
        copies[at, tier] += np.uint32(1)
        sequence_hash = values[at]
        key = _key(sequence_hash)
        at = _place(held_keys, key)
        if held_keys[at] == _EMPTY:
            held_keys[at], held_values[at] = key, sequence_hash
        if not held_copies[at, tier]:
            hashes[new] = sequence_hash
            new += 1
        held_copies[at, tier] += np.uint32(1)
    return new


@kernel
def _remove(
    keys: BlockNames,
    values: SequenceHashes,
    copies: Copies,
    held_keys: SequenceHashes,
    held_values: SequenceHashes,
    held_copies: Copies,
    size: Size,
    tier: int,
    names: BlockNames,
    gone: SequenceHashes,
) -> int:
    """How many are gone from `tier`: their sequence hashes go to `gone`."""
    count = 0
    for i in range(len(names)):
        at = _place(keys, _key(names[i]))
        if keys[at] == _EMPTY or not copies[at, tier]:
            continue
        sequence_hash = values[at]
        size[0] -= _drop_copy(keys, values, copies, at, tier)
        at = _place(held_keys, _key(sequence_hash))
        if held_copies[at, tier] == 1:
            gone[count] = sequence_hash
            count += 1
        _drop_copy(held_keys, held_values, held_copies, at, tier)
    return count


@kernel
def _refill(
    keys: BlockNames,
    values: SequenceHashes,
    copies: Copies,
    to_keys: BlockNames,
    to_values: SequenceHashes,
    to_copies: Copies,
) -> None:
    for at in range(len(keys)):
        if keys[at] != _EMPTY:
            to = _place(to_keys, keys[at])
            to_keys[to], to_values[to] = keys[at], values[at]
            to_copies[to] = copies[at]
