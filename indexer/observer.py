"""The interface of whoever counts what becomes of blocks: told once of each event, in order, as it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from indexer.hashing import SequenceHashes
from indexer.types import Tier, WorkerRank

Cause = Literal["cleared", "expired"]
"""cleared: the rank said that it holds nothing any more. expired: what was known or assumed of it is no longer
believed."""


class Observer(Protocol):
    """Snapshots are not observed: they say what a rank holds already, not what has happened. Nor is what has long
    happened."""

    def stored(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes, created: int) -> None:
        """`created`: how many of `hashes` no rank held in that tier before."""

    def removed(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes) -> None: ...

    def dropped(self, rank: WorkerRank, blocks: Mapping[Tier, int], cause: Cause) -> None:
        """Blocks dropped at once, by tier: all that the rank held, except where assumed blocks `expired`: their time to
        live was over, or the rank had no more room."""
