"""The blocks that each rank dropped last, to tell whether events have reported a block that turns out to be gone."""

from __future__ import annotations

from typing import Final

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank

KEPT: Final = 16_384
"""Blocks remembered for one rank, 128 kB: some seconds of a full cache that is replaced within a minute."""

_SMALLEST: Final = 64
"""Blocks that there is room for at first."""
_NONE = np.zeros(0, np.uint64)


class Removals:
    """A bounded log for each rank. A moment is given as a position in the log."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._logs: dict[WorkerRank, _Log] = {}

    def position(self, rank: WorkerRank) -> int:
        log = self._logs.get(rank)
        return log.end if log else 0

    def since(self, rank: WorkerRank, position: int) -> SequenceHashes | None:
        """What `rank` dropped since `position`; None where that is no longer known, or it has dropped everything
        since."""
        log = self._logs.get(rank)
        if log is None:
            return None if position else _NONE
        return log.since(position) if log.start <= position <= log.end else None

    def note(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """`rank` dropped these."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.note(hashes)

    def forget(self, rank: WorkerRank) -> None:
        """The rank has dropped everything, or its part of the index was replaced."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.end += 1
        log.start = log.end

    def drop(self, rank: WorkerRank) -> None:
        """The rank has left."""
        self._logs.pop(rank, None)


class _Log:
    """A ring buffer that grows up to `most` blocks. Events bring blocks one or a few at a time; kept as arrays of their
    own, they would take thirty times as much memory."""

    def __init__(self, most: int) -> None:
        self.start = self.end = 0
        self._most = most
        self._size = min(_SMALLEST, most)
        self._ring = np.zeros(self._size, np.uint64)

    def since(self, position: int) -> SequenceHashes:
        """From `start` on."""
        at, many = position % self._size, self.end - position
        return np.concatenate((self._ring[at : at + many], self._ring[: max(0, at + many - self._size)]))

    def note(self, hashes: SequenceHashes) -> None:
        many = len(hashes)
        if self.end - self.start + many > self._size < self._most:
            self._grow(many)
        at = self.end % self._size
        if at + many <= self._size:
            self._ring[at : at + many] = hashes
        else:
            self._write_around(hashes)
        self.end += many
        self.start = max(self.start, self.end - self._size)

    def _write_around(self, hashes: SequenceHashes) -> None:
        """Write past the ring's end to its beginning; of more blocks than there is room for, the last."""
        kept = hashes[-self._size :]
        at = (self.end + len(hashes) - len(kept)) % self._size
        first = min(len(kept), self._size - at)
        self._ring[at : at + first] = kept[:first]
        self._ring[: len(kept) - first] = kept[first:]

    def _grow(self, more: int) -> None:
        held = self.since(self.start)
        self._size = min(max(2 * self._size, len(held) + more), self._most)
        self._ring = np.zeros(self._size, np.uint64)
        self.end = self.start
        self.note(held)
