"""What a worker without events is assumed to hold: the prompts sent to it, for a while."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

from indexer.hashing import SequenceHashes
from indexer.prefix_index import PrefixIndex, as_hashes
from indexer.types import SequenceHash, Tier, WorkerRank

BYTES_PER_BLOCK = 512
"""What is remembered of a block here takes, at most."""


class AssumedPrefixes:
    """Stores into `index` with a time to live of `ttl` seconds, renewed whenever a block is assumed again."""

    def __init__(self, index: PrefixIndex, ttl: float, max_bytes: int | None = None) -> None:
        """`max_bytes`: for what is remembered here; beyond that, what was assumed first is dropped first."""
        self._index = index
        self._ttl = ttl
        self._most = sys.maxsize if max_bytes is None else max_bytes // BYTES_PER_BLOCK
        # All lives are equal, so the order of insertion is the order of expiry.
        self._expiry: OrderedDict[tuple[WorkerRank, SequenceHash], float] = OrderedDict()
        self.evicted = 0
        """How many (rank, block) were dropped for want of memory, since the start."""

    def __len__(self) -> int:
        return len(self._expiry)

    def assume(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash], now: float) -> None:
        """`rank` was sent a prompt with these sequence hashes at `now` (seconds, any steady clock)."""
        chain, until = as_hashes(hashes)[: self._most], now + self._ttl
        excess = max(0, len(self._expiry) + len(chain) - self._most)
        self.evicted += excess
        self._drop(excess)
        blocks: list[SequenceHash] = chain.tolist()
        for block in blocks:
            self._expiry[rank, block] = until
            self._expiry.move_to_end((rank, block))
        self._index.store(rank, Tier.GPU, chain)

    def expire(self, now: float) -> dict[WorkerRank, list[SequenceHash]]:
        """Drop what has outlived its time, and return it; call before a look-up."""
        many = 0
        for until in self._expiry.values():
            if until > now:
                break
            many += 1
        return self._drop(many)

    def forget(self, rank: WorkerRank) -> None:
        """The worker restarted or left: it holds nothing of what was assumed."""
        for key in [key for key in self._expiry if key[0] == rank]:
            del self._expiry[key]
        self._index.clear(rank)

    def _drop(self, many: int) -> dict[WorkerRank, list[SequenceHash]]:
        """What was assumed first."""
        dropped: dict[WorkerRank, list[SequenceHash]] = {}
        for _ in range(many):
            (rank, block), _until = self._expiry.popitem(last=False)
            dropped.setdefault(rank, []).append(block)
        for rank, blocks in dropped.items():
            self._index.remove(rank, Tier.GPU, blocks)
        return dropped
