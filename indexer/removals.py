"""The blocks that each rank dropped last: whoever finds one gone can tell whether it was said."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank

KEPT: Final = 16_384
"""Blocks of one rank, 128 kB: some seconds of a cache that is full, and changes wholly within a minute."""

_NONE = np.zeros(0, np.uint64)


class Removals:
    """Bounded; a position in what a rank has dropped stands for a moment."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._logs: dict[WorkerRank, _Log] = {}

    def position(self, rank: WorkerRank) -> int:
        log = self._logs.get(rank)
        return log.end if log else 0

    def since(self, rank: WorkerRank, position: int) -> SequenceHashes | None:
        """What `rank` dropped since then; None where that is not known any more, or it dropped everything."""
        log = self._logs.get(rank)
        if log is None:
            return None if position else _NONE
        if not log.start <= position <= log.end:
            return None
        return np.concatenate([_NONE, *(hashes for end, hashes in log.dropped if end > position)])

    def note(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """`rank` dropped these."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log()
        log.end += len(hashes)
        log.dropped.append((log.end, hashes))
        while log.end - log.start > self._kept:
            log.start, _ = log.dropped.popleft()

    def forget(self, rank: WorkerRank) -> None:
        """It holds nothing any more, or is known anew."""
        log = self._logs.setdefault(rank, _Log())
        log.dropped.clear()
        log.end += 1
        log.start = log.end

    def drop(self, rank: WorkerRank) -> None:
        """It is no more."""
        self._logs.pop(rank, None)


class _Log:
    def __init__(self) -> None:
        self.start = self.end = 0
        self.dropped: deque[tuple[int, SequenceHashes]] = deque()
        """With the position after it."""
