"""Reports what happens to blocks as events are applied, each change once and in order, for statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from indexer.hashing import SequenceHashes
from indexer.types import Tier, WorkerRank

Cause = Literal["cleared", "expired"]
"""The rank has cleared its cache; or what was known or assumed of it is no longer believed."""


class Observer(Protocol):
    """The contents of snapshots are not reported, nor the changes that they replace."""

    def stored(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes, created: int) -> None:
        """`created`: how many of `hashes` no rank held in that tier before."""

    def removed(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes) -> None: ...

    def dropped(self, rank: WorkerRank, blocks: Mapping[Tier, int], cause: Cause) -> None:
        """Many blocks at once: some that `expired` by their time to live, else everything that the rank held."""
