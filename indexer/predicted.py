"""Blocks that requests just sent will leave on their ranks, until the ranks' own events confirm them.

There are two generations of indexes. Predictions go into the younger one, and look-ups use both. Every `LIFE` seconds
the older one is dropped as a whole. So a prediction lives for one to two times `LIFE`, and expiry costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from indexer.hashing import SequenceHashes
from indexer.kernels import NO_SECRET
from indexer.matches import Matches
from indexer.prefix_index import PrefixIndex
from indexer.types import SequenceHash, Tier, WorkerRank

LIFE: Final = 5.0
"""Seconds: longer than a prefill and the delivery of its events, but short, as a prediction may never come true."""


class PredictedPrefixes:
    """`now`: seconds on a steady clock."""

    def __init__(self, life: float = LIFE, secret: int = NO_SECRET) -> None:
        """`secret`: see `PrefixIndex`."""
        self._life = life
        self._secret = secret
        self._younger, self._older = self._empty(), self._empty()
        self._began = 0.0
        self._used = [False, False]
        """Whether the younger and the older index hold anything."""

    def store(
        self,
        rank: WorkerRank,
        hashes: SequenceHashes | Sequence[SequenceHash],
        now: float,
        windows: Iterable[int] = (),
    ) -> None:
        """`rank` was sent a prompt with these sequence hashes. Layers with `windows` (in blocks) will hold the last
        blocks of it; what they keep of earlier ones, only events can tell."""
        self.expire(now)
        self._younger.store(rank, Tier.GPU, hashes)
        for window in windows:
            self._younger.store_window(rank, window, hashes[-window:])
        self._used[0] = True

    def remove(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        """`rank` has just said that it does not hold these."""
        for index in self._in_use():
            index.remove(rank, Tier.GPU, hashes)

    def forget(self, rank: WorkerRank) -> None:
        """`rank` has restarted, or its cache was cleared."""
        self._younger.clear(rank)
        self._older.clear(rank)

    def expire(self, now: float) -> None:
        """Drop what is too old; to be called before `find_matches`."""
        if now - self._began < self._life:
            return
        kept = now - self._began < 2 * self._life
        self._older = self._younger if kept and self._used[0] else self._empty()
        self._younger = self._empty()
        self._used = [False, kept and self._used[0]]
        self._began = self._began + self._life if kept else now  # not `now`: what is kept would live longer

    def find_matches(self, hashes: SequenceHashes) -> list[Matches]:
        """The matches of each generation that has any."""
        found = [index.find_on_gpu(hashes) for index in self._in_use()]
        return [matches for matches in found if matches is not None]

    def _empty(self) -> PrefixIndex:
        return PrefixIndex(secret=self._secret)

    def _in_use(self) -> list[PrefixIndex]:
        found = [self._younger] if self._used[0] else []
        return [*found, self._older] if self._used[1] else found
