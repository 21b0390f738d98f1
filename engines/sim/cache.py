"""A paged prefix cache, as vLLM V1 keeps it: physical blocks, hashes on full ones, an LRU queue of the unreferenced.

A block that no request references stays in the queue with its contents until somebody needs the space; the queue's head
goes first. Requests free their blocks last to first, so that of one prefix the tail is lost before the head (vLLM's
`KVCacheManager.free`). Two requests that compute the same block at once leave two physical copies of one hash, each
stored and removed on its own, as vLLM does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from indexer.types import Namespace, SequenceHash

BlockId = int


class Stored(NamedTuple):
    """Contiguous blocks that follow `parent` (None: from the start), with all their tokens."""

    hashes: list[SequenceHash]
    parent: SequenceHash | None
    tokens: Sequence[int]
    namespace: Namespace


class Removed(NamedTuple):
    hashes: list[SequenceHash]
    """One entry for each physical copy."""


class Cleared(NamedTuple):
    pass


CacheEvent = Stored | Removed | Cleared


class PrefixCache:
    """`capacity` physical blocks. Every method costs as much as the blocks it names, whatever the cache holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hash: list[SequenceHash | None] = [None] * capacity
        self._references = [0] * capacity
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(capacity))
        self._block: dict[SequenceHash, BlockId] = {}
        self._copies: dict[SequenceHash, list[BlockId]] = {}
        """Further physical copies of a hash in `_block`."""
        self._events: list[CacheEvent] = []

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self._block)} hashes, {self.free_blocks} of {self.capacity} blocks free>"

    @property
    def free_blocks(self) -> int:
        """Blocks that no request references, with or without contents."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """0–1; idle cached blocks count as free."""
        return 1 - len(self._free) / self.capacity

    @property
    def hashes(self) -> list[SequenceHash]:
        """All that is held, in no order."""
        return list(self._block)

    def find(self, hashes: Sequence[SequenceHash]) -> list[BlockId]:
        """Blocks of the longest leading run of `hashes` that is held; takes no reference."""
        held: list[BlockId] = []
        lookup = self._block.get
        for sequence_hash in hashes:
            block = lookup(sequence_hash)
            if block is None:
                break
            held.append(block)
        return held

    def idle(self, blocks: Sequence[BlockId]) -> int:
        """How many of `blocks` no request references: acquiring them takes as many free blocks."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Reference blocks that `find` returned."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` empty blocks with one reference each, evicting the least recently freed; None if too few are free."""
        if count > len(self._free):
            return None
        blocks: list[BlockId] = []
        removed: list[SequenceHash] = []
        names, references, copies, take = self._hash, self._references, self._copies, self._free.popitem
        for _ in range(count):
            block, _none = take(last=False)
            sequence_hash = names[block]
            if sequence_hash is not None:
                if sequence_hash in copies:
                    self._forget(block, sequence_hash)
                else:  # nearly always, and a simulated cache does little else
                    names[block] = None
                    del self._block[sequence_hash]
                removed.append(sequence_hash)
            references[block] = 1
            blocks.append(block)
        if removed:
            self._events.append(Removed(removed))
        return blocks

    def store(
        self,
        blocks: Sequence[BlockId],
        hashes: list[SequenceHash],
        parent: SequenceHash | None,
        tokens: Sequence[int],
        namespace: Namespace,
    ) -> None:
        """Name the contents of allocated blocks, so that `find` sees them."""
        names, first = self._hash, self._block.setdefault
        for block, sequence_hash in zip(blocks, hashes, strict=True):
            names[block] = sequence_hash
            if first(sequence_hash, block) != block:
                self._copies.setdefault(sequence_hash, []).append(block)
        self._events.append(Stored(hashes, parent, tokens, namespace))

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each of a request's blocks, given in prompt order."""
        references, free = self._references, self._free
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if not left:
                free[block] = None

    def clear(self) -> bool:
        """Forget all contents; False, changing nothing, while a request references a block (as both engines refuse)."""
        if len(self._free) < self.capacity:
            return False
        self._hash = [None] * self.capacity
        self._block.clear()
        self._copies.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """AssertionError when the books disagree; walks the whole cache, so for tests only."""
        for block, references in enumerate(self._references):
            if references < 0 or (references == 0) != (block in self._free):
                raise AssertionError(f"block {block} has {references} references")
        named = {block: name for block, name in enumerate(self._hash) if name is not None}
        listed = {block: name for name, block in self._block.items()}
        for name, copies in self._copies.items():
            if not copies or name not in self._block:
                raise AssertionError(f"{copies} are further copies of a hash without a first")
            listed.update(dict.fromkeys(copies, name))
        if named != listed:
            raise AssertionError("blocks and hashes do not name each other")

    def _forget(self, block: BlockId, sequence_hash: SequenceHash) -> None:
        self._hash[block] = None
        copies = self._copies.get(sequence_hash)
        if copies is None:
            del self._block[sequence_hash]
            return
        if self._block[sequence_hash] == block:
            self._block[sequence_hash] = copies.pop()
        else:
            copies.remove(block)
        if not copies:
            del self._copies[sequence_hash]
