"""What a worker without events is assumed to hold: the prompts sent to it, for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from indexer.prefix_index import PrefixIndex
from indexer.types import SequenceHash, Tier, WorkerRank


class AssumedPrefixes:
    """Stores into `index` with a time to live of `ttl` seconds, renewed whenever a block is assumed again."""

    def __init__(self, index: PrefixIndex, ttl: float) -> None:
        self._index = index
        self._ttl = ttl
        # All lives are equal, so the order of insertion is the order of expiry.
        self._expiry: OrderedDict[tuple[WorkerRank, SequenceHash], float] = OrderedDict()

    def assume(self, rank: WorkerRank, hashes: Iterable[SequenceHash], now: float) -> None:
        """`rank` was sent a prompt with these sequence hashes at `now` (seconds, any steady clock)."""
        hashes = list(hashes)
        for block in hashes:
            self._expiry[rank, block] = now + self._ttl
            self._expiry.move_to_end((rank, block))
        self._index.store(rank, Tier.GPU, hashes)

    def expire(self, now: float) -> None:
        """Drop what has outlived its time; call before a look-up."""
        while self._expiry:
            (rank, block), until = next(iter(self._expiry.items()))
            if until > now:
                return
            del self._expiry[rank, block]
            self._index.remove(rank, Tier.GPU, [block])

    def forget(self, rank: WorkerRank) -> None:
        """The worker restarted or left: it holds nothing of what was assumed."""
        for key in [key for key in self._expiry if key[0] == rank]:
            del self._expiry[key]
        self._index.clear(rank)
