"""What a worker is assumed to hold of what it was sent, where no events tell.

Where the size of its cache is known, as a cache of that size would that drops what was unused for longest, as engines
do. Elsewhere, for a time to live.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final, TypeAlias

from indexer.hashing import SequenceHashes
from indexer.kernels import NO_SECRET
from indexer.lives import BYTES_PER_LIFE, Lives
from indexer.prefix_index import PrefixIndex, as_hashes
from indexer.types import SequenceHash, Tier, WorkerRank

_MICRO: Final = 1e6
"""Microseconds in a second."""
_LONGEST: Final = 1e9
"""Seconds (thirty years), so that times in microseconds fit 64 bits."""
_TIMED: Final = 0
"""The order in `Lives` of all ranks whose blocks have a time to live."""

Dropped: TypeAlias = dict[WorkerRank, SequenceHashes]


class _Cache:
    """A rank's number in `Lives`, which is never reused; and, where its size in blocks is known, its own order there
    and how many lives that has."""

    __slots__ = ("held", "number", "order", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.order = _TIMED
        self.size = sys.maxsize
        self.held = 0


class AssumedPrefixes:
    """Stores into `index`. A block that is assumed again is as good as new."""

    def __init__(self, index: PrefixIndex, ttl: float, max_bytes: int | None = None, secret: int = NO_SECRET) -> None:
        """`ttl`: seconds, for ranks whose size is unknown. `max_bytes`: for the lives kept here; beyond that, blocks
        are dropped where most are. `secret`: see `PrefixIndex`."""
        self._index = index
        self._ttl = min(ttl, _LONGEST)
        self._most = sys.maxsize if max_bytes is None else max_bytes // BYTES_PER_LIFE
        self._lives = Lives(secret)
        self._caches: dict[WorkerRank, _Cache] = {}
        self._owners: dict[int, WorkerRank] = {}
        """Ranks by their numbers."""
        self._given = 0
        self._none_before = math.inf
        """Seconds; no life with a time to live ends before this."""
        self.evicted = 0
        """How many (rank, block) were dropped for want of memory, since the start."""

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def nbytes(self) -> int:
        return self._lives.nbytes

    def resize(self, rank: WorkerRank, size: int | None) -> Dropped:
        """The rank's cache has room for `size` blocks; None: that is not known any more, as of another engine. Returns
        what is dropped then: when it was assumed is not known either."""
        if size is None:
            return self._unsize(rank)
        cache = self._cache(rank)
        cache.size = size
        if cache.order == _TIMED:
            cache.order = self._lives.new_order()
            cache.held = self._lives.move(cache.number, cache.order)
        return {}

    def _unsize(self, rank: WorkerRank) -> Dropped:
        cache = self._caches.get(rank)
        if cache is None or cache.order == _TIMED:
            return {}
        dropped = self._drop(cache.held, cache)
        self._lives.close_order(cache.order)
        cache.order, cache.size = _TIMED, sys.maxsize
        return dropped

    def assume(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash], now: float) -> Dropped:
        """`rank` was sent a prompt with these sequence hashes at `now` (seconds, any steady clock). Returns what no
        longer has room there."""
        cache, until = self._cache(rank), now + self._ttl
        chain = as_hashes(hashes)[: min(self._most, cache.size)]
        self._make_room(len(chain))
        new = self._lives.renew(cache.number, chain, int(until * _MICRO), cache.order)
        self._index.store(rank, Tier.GPU, chain)
        if cache.order == _TIMED:
            self._none_before = min(self._none_before, until)
            return {}
        cache.held += new
        return self._drop(max(0, cache.held - cache.size), cache)

    def retract(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        """`rank` will not hold these after all. Their lives run on without effect, unless the blocks are assumed
        again."""
        self._index.remove(rank, Tier.GPU, hashes)

    def expire(self, now: float) -> Dropped:
        """Drop what has expired, and return it by rank; to be called before a look-up."""
        if now < self._none_before:
            return {}
        return self._drop(self._lives.ended(int(now * _MICRO)))

    def clear(self, rank: WorkerRank) -> None:
        """The worker has restarted: nothing that was assumed of it is true any more."""
        cache = self._caches.get(rank)
        if cache:
            self._lives.forget(cache.number, cache.order)
            cache.held = 0
        self._index.clear(rank)

    def forget(self, rank: WorkerRank) -> None:
        """The worker has left."""
        self.clear(rank)
        cache = self._caches.pop(rank, None)
        if cache:
            del self._owners[cache.number]
            if cache.order != _TIMED:
                self._lives.close_order(cache.order)

    def _cache(self, rank: WorkerRank) -> _Cache:
        cache = self._caches.get(rank)
        if cache is None:
            cache = self._caches[rank] = _Cache(self._given)
            self._owners[self._given] = rank
            self._given += 1
        return cache

    def _make_room(self, blocks: int) -> None:
        """Drop what is oldest where most is held, until there is memory for so many blocks more."""
        while (excess := self._lives.rows + blocks - self._most) > 0 and len(self):
            sized = max(self._caches.values(), key=lambda cache: cache.held)
            timed = len(self) - sum(cache.held for cache in self._caches.values())
            many = min(excess, max(timed, sized.held))
            self.evicted += many
            self._drop(many, None if timed >= sized.held else sized)

    def _drop(self, many: int, cache: _Cache | None = None) -> Dropped:
        """Drop the `many` oldest assumptions of a rank with a size, or of all that have none."""
        if not many:
            return {}
        blocks, owners = self._lives.take(many, cache.order if cache else _TIMED)
        if cache:
            cache.held -= many
            dropped = {self._owners[cache.number]: blocks}
        else:
            dropped = {self._owners[number]: blocks[owners == number] for number in set(owners.tolist())}
            end = self._lives.first_end
            self._none_before = math.inf if end is None else end / _MICRO
        for rank, theirs in dropped.items():
            self._index.remove(rank, Tier.GPU, theirs)
        return dropped
