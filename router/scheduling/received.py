"""How much KV other ranks have computed for each rank lately.

New blocks evict older ones. In a fleet that is mostly idle, decode ranks differ by little else: without this, one of
them would get every prompt that none holds, and evict those that are about to come again while the others' caches are
empty.
"""

from __future__ import annotations

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.candidates import Seconds
from router.scheduling.figures import LATELY_MEMORY
from router.scheduling.places import Places


class Received:
    """`now` is in seconds on a steady clock."""

    def __init__(self) -> None:
        self._places = Places()
        self._tokens = np.zeros(2)
        """By place, with exponential decay up to `_at`. The last column stands for ranks without a place and stays
        0."""
        self._at = np.zeros(2)

    def watch(self, rank: WorkerRank) -> None:
        place = self._places.add(rank)
        if place >= len(self._tokens) - 1:
            more = np.zeros(place + 2)
            self._tokens, self._at = np.append(self._tokens, more), np.append(self._at, more)

    def forget(self, rank: WorkerRank) -> None:
        place = self._places.drop(rank)
        if place is not None:
            self._tokens[place] = 0.0
            self._places.free(place)

    def add(self, rank: WorkerRank, tokens: int, now: float) -> None:
        """So many tokens of KV are moved to `rank`."""
        place = self._places.get(rank)
        if place is not None:
            kept = np.exp((self._at[place] - now) / LATELY_MEMORY)
            self._tokens[place], self._at[place] = kept * self._tokens[place] + tokens, now

    def shares(self, ranks: RankSet, now: float) -> Seconds:
        """What each of `ranks` received within about the last minute, relative to the one that received most."""
        places = self._places.of(ranks)
        lately: Seconds = self._tokens[places] * np.exp((self._at[places] - now) / LATELY_MEMORY)
        most = lately.max()
        return lately / most if most else lately
