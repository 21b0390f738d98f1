"""What becomes of blocks, for whoever counts it: told as ranks' events are applied, each once and in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from indexer.hashing import SequenceHashes
from indexer.types import Tier, WorkerRank

Cause = Literal["cleared", "expired"]
"""The rank said that it holds nothing any more; or what was known or assumed of it is believed no longer."""


class Observer(Protocol):
    """A snapshot says what a rank holds already: nothing of it is told here, and nothing that passed before it."""

    def stored(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes, created: int) -> None:
        """`created`: how many of `hashes` no rank held in that tier until now."""

    def removed(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes) -> None: ...

    def dropped(self, rank: WorkerRank, blocks: Mapping[Tier, int], cause: Cause) -> None:
        """Many at once. Where it `expired` by the time to live, some of what the rank holds; else all of it."""
