"""Lifetimes of blocks, and times to their first reuse and to further copies, of a sample (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

from indexer.types import SequenceHash, Tier, WorkerRank
from router.metrics.tallies import Histogram

BOUNDS: Final = (0.1, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
MOST: Final = 10_000
"""Blocks of the sample that are followed, about 5 MB: 640,000 of all. Beyond them, those stored first are forgotten."""

_Block: TypeAlias = tuple[Tier, SequenceHash]


class _Copy:
    __slots__ = ("stored", "used")

    def __init__(self, stored: float) -> None:
        self.stored = stored
        self.used = False


class BlockAges:
    """`hashes`: those of the sample. `now`: seconds on a steady clock."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._copies: OrderedDict[_Block, dict[WorkerRank, _Copy]] = OrderedDict()
        self._emptied: dict[WorkerRank, float] = {}
        """When a rank last lost all its blocks: its older copies do not exist any more."""
        self.lives = {tier: Histogram(BOUNDS) for tier in Tier}
        self.first_reuse = Histogram(BOUNDS)
        self.replication = Histogram(BOUNDS)

    def __len__(self) -> int:
        return len(self._copies)

    def stored(self, rank: WorkerRank, tier: Tier, hashes: Iterable[SequenceHash], now: float) -> None:
        for one in hashes:
            copies = self._copies.setdefault((tier, one), {})
            if copies and tier is Tier.GPU:
                others = [copy.stored for other, copy in copies.items() if other != rank and self._holds(other, copy)]
                if others:
                    self.replication.observe(now - min(others))
            copies[rank] = _Copy(now)
        while len(self._copies) > self._most:
            self._copies.popitem(last=False)

    def removed(self, rank: WorkerRank, tier: Tier, hashes: Iterable[SequenceHash], now: float) -> None:
        for one in hashes:
            copies = self._copies.get((tier, one))
            copy = copies.pop(rank, None) if copies else None
            if copy and self._holds(rank, copy):
                self.lives[tier].observe(now - copy.stored)
            if copies is not None and not copies:
                del self._copies[tier, one]

    def emptied(self, rank: WorkerRank, now: float) -> None:
        """The rank lost all blocks at once, which says nothing about how long blocks live."""
        self._emptied[rank] = now

    def keep(self, workers: Collection[str]) -> None:
        """Drop the blocks of all workers but these: the others have left."""
        for rank in [rank for rank in self._emptied if rank.worker_id not in workers]:
            del self._emptied[rank]
        for block, copies in list(self._copies.items()):
            for rank in [rank for rank in copies if rank.worker_id not in workers]:
                del copies[rank]
            if not copies:
                del self._copies[block]

    def reused(self, rank: WorkerRank, hashes: Iterable[SequenceHash], now: float) -> None:
        """A request was sent where these are held."""
        for one in hashes:
            copies = self._copies.get((Tier.GPU, one))
            copy = copies.get(rank) if copies else None
            if copy and not copy.used and self._holds(rank, copy):
                copy.used = True
                self.first_reuse.observe(now - copy.stored)

    def _holds(self, rank: WorkerRank, copy: _Copy) -> bool:
        return copy.stored >= self._emptied.get(rank, 0.0)
