"""What a worker without KV events is assumed to hold: the prompts sent to it, for a time to live."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

from indexer.hashing import SequenceHashes
from indexer.lives import BYTES_PER_LIFE, Lives
from indexer.prefix_index import PrefixIndex, as_hashes
from indexer.types import SequenceHash, Tier, WorkerRank

_MICRO: Final = 1e6
"""Microseconds in a second."""
_LONGEST: Final = 1e9
"""Seconds (thirty years), so that times in microseconds fit 64 bits."""


class AssumedPrefixes:
    """Stores into `index` with a time to live of `ttl` seconds, renewed whenever a block is assumed again."""

    def __init__(self, index: PrefixIndex, ttl: float, max_bytes: int | None = None) -> None:
        """`max_bytes`: for the expiry times kept here; beyond that, the oldest assumptions are dropped first."""
        self._index = index
        self._ttl = min(ttl, _LONGEST)
        self._most = sys.maxsize if max_bytes is None else max_bytes // BYTES_PER_LIFE
        self._lives = Lives()
        self._ranks: dict[WorkerRank, int] = {}
        self._owners: dict[int, WorkerRank] = {}
        """Ranks by their numbers in `Lives`, which are never reused."""
        self._given = 0
        self._none_before = math.inf
        """Seconds; no life ends before this."""
        self.evicted = 0
        """How many (rank, block) were dropped for want of memory, since the start."""

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def nbytes(self) -> int:
        return self._lives.nbytes

    def assume(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash], now: float) -> None:
        """`rank` was sent a prompt with these sequence hashes at `now` (seconds, any steady clock)."""
        chain, until = as_hashes(hashes)[: self._most], now + self._ttl
        excess = max(0, len(self) + len(chain) - self._most)
        if excess:
            self.evicted += excess
            self._drop(excess)
        self._lives.renew(self._number(rank), chain, int(until * _MICRO))
        self._none_before = min(self._none_before, until)
        self._index.store(rank, Tier.GPU, chain)

    def retract(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        """`rank` will not hold these after all. Their lives run on without effect, unless the blocks are assumed
        again."""
        self._index.remove(rank, Tier.GPU, hashes)

    def expire(self, now: float) -> dict[WorkerRank, SequenceHashes]:
        """Drop what has expired, and return it by rank; to be called before a look-up."""
        if now < self._none_before:
            return {}
        return self._drop(self._lives.ended(int(now * _MICRO)))

    def forget(self, rank: WorkerRank) -> None:
        """The worker has restarted or left: nothing that was assumed of it is true any more."""
        number = self._ranks.pop(rank, None)
        if number is not None:
            del self._owners[number]
            self._lives.forget(number)
        self._index.clear(rank)

    def _number(self, rank: WorkerRank) -> int:
        number = self._ranks.get(rank)
        if number is None:
            number = self._ranks[rank] = self._given
            self._owners[number] = rank
            self._given += 1
        return number

    def _drop(self, many: int) -> dict[WorkerRank, SequenceHashes]:
        """Drop the `many` oldest assumptions."""
        blocks, owners = self._lives.take(many)
        dropped = {self._owners[number]: blocks[owners == number] for number in set(owners.tolist())}
        for rank, theirs in dropped.items():
            self._index.remove(rank, Tier.GPU, theirs)
        end = self._lives.first_end
        self._none_before = math.inf if end is None else end / _MICRO
        return dropped
