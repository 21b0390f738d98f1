"""What a rank's layers with a window hold: those of a hybrid model that look back over a number of blocks only.

An engine keeps, evicts and tells of the blocks of each group of layers by itself, and goes on with a prompt only where
every group has what it needs. So a block counts for a window once all groups with that window hold it, in whatever
tier: each may have moved it to a lower one or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from indexer.handles import BlockHandles, BlockNames
from indexer.hashing import SequenceHashes
from indexer.kernels import NO_SECRET
from indexer.types import EngineHash, Tier

_NOTHING: SequenceHashes = np.zeros(0, np.uint64)


class _Group(NamedTuple):
    window: int
    blocks: BlockHandles


class WindowBlocks:
    """By window, in blocks."""

    def __init__(self, secret: int = NO_SECRET) -> None:
        """`secret`: see `BlockHandles`."""
        self._secret = secret
        self._groups: dict[int, _Group] = {}

    @property
    def windows(self) -> set[int]:
        return {group.window for group in self._groups.values()}

    def window_of(self, group: int) -> int | None:
        known = self._groups.get(group)
        return known.window if known else None

    def held(self, window: int) -> SequenceHashes:
        """The blocks that all groups with that window hold, in no order."""
        groups = [group.blocks for group in self._groups.values() if group.window == window]
        held = np.unique(np.concatenate([_NOTHING, *groups[0].held().values()])) if groups else _NOTHING
        for other in groups[1:]:
            held = other.holding(held)
        return held

    def welcome(self, group: int, window: int) -> SequenceHashes:
        """To be called before `store`. A group that is new holds nothing, so that no block is held any more by all
        groups with its window: returns those that were."""
        if group in self._groups:
            return _NOTHING
        lost = self.held(window)
        self._groups[group] = _Group(window, BlockHandles(secret=self._secret))
        return lost

    def store(self, group: int, tier: Tier, names: BlockNames, hashes: SequenceHashes) -> SequenceHashes:
        """The group now holds the blocks with these names and hashes. Returns those that all groups with its window
        hold now, and did not before. The group must have been welcomed."""
        blocks = self._groups[group].blocks
        before = blocks.holding(hashes)
        return self._in_others(group, _without(blocks.adopt(tier, names, hashes), before))

    def remove(
        self, group: int, tier: Tier, engine_hashes: Sequence[EngineHash] | BlockNames
    ) -> tuple[int, SequenceHashes]:
        """The group holds these blocks no more in `tier`. Returns its window, and the blocks that all groups with it
        held before and do not any more. Ignores what is unknown; raises TypeError for what is no hash."""
        known = self._groups.get(group)
        if known is None:
            return 0, _NOTHING
        gone = known.blocks.remove(tier, engine_hashes)
        return known.window, self._in_others(group, _without(gone, known.blocks.holding(gone)))

    def empty(self) -> None:
        """Nothing is held any more; the groups are what they are."""
        for group in self._groups.values():
            group.blocks.clear()

    def _in_others(self, group: int, hashes: SequenceHashes) -> SequenceHashes:
        window = self._groups[group].window
        for number, other in self._groups.items():
            if number != group and other.window == window:
                hashes = other.blocks.holding(hashes)
        return hashes


def _without(hashes: SequenceHashes, others: SequenceHashes) -> SequenceHashes:
    return hashes[~np.isin(hashes, others)] if len(others) else hashes
