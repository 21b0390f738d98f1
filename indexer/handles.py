"""One engine rank's blocks: its opaque hashes on one side, our sequence hashes on the other.

Engines name a parent and a removal by their own hash alone, so somebody must remember which sequence hash that was. An
engine may hold several copies of one block (a hash stored twice must be removed twice), hence the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from indexer.hashing import chain_hashes, pack_tokens
from indexer.types import EngineHash, SequenceHash, Tier


class UnknownParent(Exception):
    """A store names a parent that was never seen: the prefix before it is unknown, so the blocks cannot be placed."""


class BlockHandles:
    """Not thread-safe; every method is all or nothing."""

    def __init__(self) -> None:
        self._sequence: dict[EngineHash, SequenceHash] = {}
        self._copies: Counter[tuple[EngineHash, Tier]] = Counter()
        self._held: dict[Tier, Counter[SequenceHash]] = {tier: Counter() for tier in Tier}

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
        sequence = chain_hashes(pack_tokens(token_ids), block_size, root, extras)
        held = self._held[tier]
        new = []
        for engine_hash, computed in zip(engine_hashes, sequence, strict=True):
            # The first meaning stays: an engine hash cannot change its tokens while a copy exists.
            sequence_hash = self._sequence.setdefault(engine_hash, computed)
            self._copies[engine_hash, tier] += 1
            held[sequence_hash] += 1
            if held[sequence_hash] == 1:
                new.append(sequence_hash)
        return new

    def remove(self, tier: Tier, engine_hashes: Sequence[EngineHash]) -> list[SequenceHash]:
        """Drop one copy of each; returns the sequence hashes that `tier` no longer holds. Ignores unknown hashes."""
        gone = []
        for engine_hash in engine_hashes:
            if not self._drop_copy(engine_hash, tier):
                continue
            sequence_hash = self._sequence[engine_hash]
            held = self._held[tier]
            held[sequence_hash] -= 1
            if not held[sequence_hash]:
                del held[sequence_hash]
                gone.append(sequence_hash)
            if not any((engine_hash, other) in self._copies for other in Tier):
                del self._sequence[engine_hash]
        return gone

    def _drop_copy(self, engine_hash: EngineHash, tier: Tier) -> bool:
        key = (engine_hash, tier)
        if key not in self._copies:
            return False
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key]
        return True

    def clear(self) -> None:
        self._sequence.clear()
        self._copies.clear()
        for held in self._held.values():
            held.clear()

    def held(self) -> dict[Tier, list[SequenceHash]]:
        """Everything held, by tier: what a snapshot says."""
        return {tier: list(held) for tier, held in self._held.items() if held}
