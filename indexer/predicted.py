"""The blocks that ranks will hold because of requests just sent to them, until their own events say so.

There are two generations of indexes. Predictions go into the younger one, and both are asked; every `LIFE` seconds the
older one is thrown away whole. So a prediction lives for one to two times `LIFE`, and forgetting costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from indexer.hashing import SequenceHashes
from indexer.matches import Matches
from indexer.prefix_index import PrefixIndex
from indexer.types import SequenceHash, Tier, WorkerRank

LIFE: Final = 5.0
"""Seconds: longer than a prefill takes with its events, and short enough that a wrong prediction does little harm."""


class PredictedPrefixes:
    """`now`: seconds on a steady clock."""

    def __init__(self, life: float = LIFE) -> None:
        self._life = life
        self._younger, self._older = PrefixIndex(), PrefixIndex()
        self._began = 0.0
        self._used = [False, False]
        """Whether the younger and the older one hold anything."""

    def store(
        self,
        rank: WorkerRank,
        hashes: SequenceHashes | Sequence[SequenceHash],
        now: float,
        windows: Iterable[int] = (),
    ) -> None:
        """`rank` was sent a prompt with these sequence hashes. Its layers with `windows`, in blocks, will hold the last
        blocks of the prompt; whether they keep earlier ones, only events will tell."""
        self.expire(now)
        self._younger.store(rank, Tier.GPU, hashes)
        for window in windows:
            self._younger.store_window(rank, window, hashes[-window:])
        self._used[0] = True

    def remove(self, rank: WorkerRank, hashes: SequenceHashes | Sequence[SequenceHash]) -> None:
        """The rank's events say that it does not hold these, which overrides predictions."""
        for index in self._in_use():
            index.remove(rank, Tier.GPU, hashes)

    def forget(self, rank: WorkerRank) -> None:
        """It restarted, or its cache was cleared."""
        self._younger.clear(rank)
        self._older.clear(rank)

    def expire(self, now: float) -> None:
        """Drop what is too old; to be called before `find_matches`."""
        if now - self._began < self._life:
            return
        kept = now - self._began < 2 * self._life
        self._older = self._younger if kept and self._used[0] else PrefixIndex()
        self._younger = PrefixIndex()
        self._used = [False, kept and self._used[0]]
        self._began = self._began + self._life if kept else now  # not now: what is kept would live for longer

    def find_matches(self, hashes: SequenceHashes) -> list[Matches]:
        """The matches from each generation that has any."""
        found = [index.find_on_gpu(hashes) for index in self._in_use()]
        return [matches for matches in found if matches is not None]

    def _in_use(self) -> list[PrefixIndex]:
        found = [self._younger] if self._used[0] else []
        return [*found, self._older] if self._used[1] else found
