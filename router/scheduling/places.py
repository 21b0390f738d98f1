"""Where each rank's figures are in the books' arrays. Positions of recurring sets of ranks are remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.types import RankSet, WorkerRank

Positions: TypeAlias = npt.NDArray[np.intp]

_MAX_SETS = 64
"""Most sets remembered; a fleet that does not change has one for all models of the same workers."""


class NoPlace(Exception):
    """Why a rank can have no place, in one sentence without its stop."""


class Places:
    """Gives out places from 0 on, freed ones first; or, for shared books, the places that `claim` returns and `release`
    takes back."""

    def __init__(
        self, claim: Callable[[WorkerRank], int] | None = None, release: Callable[[int], None] | None = None
    ) -> None:
        self._claim = claim
        self._release = release
        self._places: dict[WorkerRank, int] = {}
        self._free: list[int] = []
        self._high = 0
        self._known: dict[RankSet, Positions] = {}

    def get(self, rank: WorkerRank) -> int | None:
        return self._places.get(rank)

    def add(self, rank: WorkerRank) -> int:
        """The place of `rank`; a new one if it has none."""
        place = self._places.get(rank)
        if place is None:
            place = self._claim(rank) if self._claim else self._next()
            self._places[rank] = place
            self._known.clear()
        return place

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        self._high += 1
        return self._high - 1

    def drop(self, rank: WorkerRank) -> int | None:
        """Take its place from `rank` and return it. The caller has to `free` it; until then nobody else gets it."""
        self._known.clear()
        return self._places.pop(rank, None)

    def free(self, place: int) -> None:
        if self._release:
            self._release(place)
        else:
            self._free.append(place)

    def ranks(self) -> dict[WorkerRank, int]:
        return dict(self._places)

    def of(self, ranks: RankSet) -> Positions:
        """The places of `ranks` in order; −1 for a rank that has none."""
        found = self._known.get(ranks)
        if found is None:
            places = [self._places.get(rank, -1) for rank in ranks.ranks]
            if len(self._known) >= _MAX_SETS:
                self._known.clear()
            found = self._known[ranks] = np.array(places, np.intp)
        return found
