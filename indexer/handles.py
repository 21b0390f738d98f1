"""One engine rank's blocks: its opaque hashes on one side, our sequence hashes on the other.

Engines name a parent and a removal by their own hash alone, so somebody must remember which sequence hash that was. An
engine may hold several copies of one block (a hash stored twice must be removed twice), hence the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from indexer.hashing import chain_hashes, pack_tokens
from indexer.types import EngineHash, SequenceHash, Tier

_Name = TypeVar("_Name")


class UnknownParent(Exception):
    """A store names a parent that was never seen: the prefix before it is unknown, so the blocks cannot be placed."""


class BlockHandles:
    """Not thread-safe; every method is all or nothing."""

    def __init__(self) -> None:
        self._sequence: dict[EngineHash, SequenceHash] = {}
        self._tiers = {tier: _TierCopies({}, {}) for tier in Tier}

    def __len__(self) -> int:
        return len(self._sequence)

    def store(
        self,
        tier: Tier,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None,
        token_ids: Sequence[int],
        block_size: int,
        root: SequenceHash,
        extras: Sequence[bytes] = (),
    ) -> list[SequenceHash]:
        """Record contiguous blocks; returns the sequence hashes that `tier` did not hold before, in order.

        `root` seeds the chain when `parent` is None. Raises UnknownParent, ValueError when tokens and hashes do not
        agree in number, OverflowError or TypeError for what is no token id.
        """
        if len(token_ids) != len(engine_hashes) * block_size:
            raise ValueError(f"{len(token_ids)} tokens for {len(engine_hashes)} blocks of {block_size}")
        if parent is not None:
            if parent not in self._sequence:
                raise UnknownParent
            root = self._sequence[parent]
        computed = chain_hashes(pack_tokens(token_ids), block_size, root, extras)
        copies, held = self._tiers[tier]
        new = []
        for engine_hash, fresh in zip(engine_hashes, computed.tolist(), strict=True):
            # The first meaning stays: an engine hash cannot change its tokens while a copy exists.
            sequence_hash = self._sequence.setdefault(engine_hash, fresh)
            copies[engine_hash] = copies.get(engine_hash, 0) + 1
            count = held.get(sequence_hash, 0)
            held[sequence_hash] = count + 1
            if not count:
                new.append(sequence_hash)
        return new

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash]) -> list[SequenceHash]:
        """Drop one copy of each; returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes."""
        copies, held = self._tiers[tier]
        elsewhere = [other.copies for name, other in self._tiers.items() if name is not tier and other.copies]
        gone = []
        for engine_hash in engine_hashes:
            if engine_hash not in copies:
                continue
            sequence_hash = self._sequence[engine_hash]
            if _count_down(held, sequence_hash):
                gone.append(sequence_hash)
            if _count_down(copies, engine_hash) and not any(engine_hash in other for other in elsewhere):
                del self._sequence[engine_hash]
        return gone

    def clear(self) -> None:
        self._sequence.clear()
        for copies, held in self._tiers.values():
            copies.clear()
            held.clear()

    def held(self) -> dict[Tier, list[SequenceHash]]:
        """Everything held, by tier: what a snapshot says."""
        return {tier: list(held) for tier, (_, held) in self._tiers.items() if held}


class _TierCopies(NamedTuple):
    """How many copies a tier has, by either name; nothing is counted as zero."""

    copies: dict[EngineHash, int]
    held: dict[SequenceHash, int]


def _count_down(counts: dict[_Name, int], name: _Name) -> bool:
    """Whether that was the last one."""
    left = counts[name] - 1
    if left:
        counts[name] = left
        return False
    del counts[name]
    return True
