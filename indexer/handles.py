"""One engine rank's blocks: from the engine's opaque hashes to the router's sequence hashes.

Engines name parents and removals by their own hashes, so the sequence hash of each has to be remembered. An engine may
hold several copies of a block (a hash that was stored twice must be removed twice), hence the counts. What goes through
both tables is in `handle_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from indexer import handle_kernels as kernels
from indexer.handle_kernels import BITS, COPIES, KEY, OF_TIER, Table
from indexer.hashing import SequenceHashes, Tokens, chain_hashes, pack_tokens
from indexer.kernels import NO_SECRET
from indexer.types import EngineHash, SequenceHash, Tier

BlockNames: TypeAlias = npt.NDArray[np.uint64]
"""Engine hashes in 64 bits, as `block_names` makes them."""

_SMALLEST = 1024
_FULLEST = 0.6
_FRESH = 0.35
MOST_EXPECTED = 1 << 20
"""Blocks for which room is made at once, whatever is expected: 84 MB once they are held."""

_MASK = (1 << 64) - 1


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

    def __init__(self, expected: int = 0, secret: int = NO_SECRET) -> None:
        """`expected`: blocks that may be held. Up to so many, nothing is ever moved: that takes 0.1 s for 300,000.
        `secret`: see `indexer.prefix_index.PrefixIndex`."""
        self._secret = secret
        self._least = _SMALLEST
        while min(expected, MOST_EXPECTED) >= _FULLEST * self._least:
            self._least *= 2
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
        once: bool = False,
    ) -> SequenceHashes:
        """Record contiguous blocks. Returns the sequence hashes that `tier` did not hold before, in order.

        `root` seeds the chain if `parent` is None. With `once`, blocks that `tier` has already get no further copy.
        Raises UnknownParent, ValueError if the numbers of tokens and hashes do not match, and OverflowError or
        TypeError for anything that is not a token id or a hash.
        """
        blocks = len(engine_hashes)
        if len(token_ids) != blocks * block_size:
            raise ValueError(f"{len(token_ids)} tokens for {blocks} blocks of {block_size}")
        if parent is not None:
            root = self._sequence_hash(parent)
        names = block_names(engine_hashes)
        hashes = chain_hashes(pack_tokens(token_ids), block_size, root, extras)
        self._make_room(blocks)
        new = kernels.store(self._names, self._held, self._size, int(tier), names, hashes, once)
        return hashes[:new]

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash] | BlockNames) -> SequenceHashes:
        """Drop one copy of each. Returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes.

        Raises TypeError for anything that is not a hash.
        """
        names = block_names(engine_hashes)
        gone = np.empty(len(names), np.uint64)
        count = kernels.remove(self._names, self._held, self._size, int(tier), names, gone)
        return gone[:count]

    def find(self, engine_hashes: Sequence[EngineHash] | BlockNames) -> tuple[BlockNames, SequenceHashes]:
        """The names of those that are held in any tier, and their sequence hashes. Raises TypeError for anything that
        is not a hash."""
        names = block_names(engine_hashes).copy()
        hashes = np.empty(len(names), np.uint64)
        known = kernels.find(self._names, self._size, names, hashes)
        return names[:known], hashes[:known]

    def adopt(self, tier: Tier, names: BlockNames, hashes: SequenceHashes) -> SequenceHashes:
        """`store` for blocks that another `BlockHandles` knows, as its `find` returned them."""
        self._make_room(len(names))
        hashes = hashes.copy()
        new = kernels.store(self._names, self._held, self._size, int(tier), names, hashes, False)
        return hashes[:new]

    def holding(self, hashes: SequenceHashes) -> SequenceHashes:
        """Those of `hashes` that are held in any tier."""
        kept = hashes.copy()
        count = kernels.keep_held(self._held, self._size, kept)
        return kept[:count]

    def clear(self) -> None:
        # Pages of zeros take no memory until they are written to.
        self._names = np.zeros((self._least, 3), np.uint64)
        self._held = np.zeros((self._least, 2), np.uint64)
        self._size = np.array([0, 0, self._secret], np.int64)

    def held(self) -> dict[Tier, SequenceHashes]:
        """Everything held, by tier, in no particular order: the content of a snapshot."""
        found = {}
        for tier in Tier:
            keys = self._held[(self._held[:, COPIES] >> np.uint64(BITS * tier)) & OF_TIER > 0, KEY]
            if len(keys):
                found[tier] = kernels.names_of(keys, self._secret)
        return found

    def _sequence_hash(self, parent: EngineHash) -> SequenceHash:
        found, sequence_hash = kernels.look_up(self._names, self._size, np.uint64(block_name(parent)))
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
    kernels.refill(table, larger)
    return larger
