"""The blocks that each rank dropped last: whoever finds one gone can tell whether it was said."""

from __future__ import annotations

from typing import Final

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank

KEPT: Final = 16_384
"""Blocks of one rank, 128 kB: some seconds of a cache that is full, and changes wholly within a minute."""

_SMALLEST: Final = 64
"""Blocks that there is room for to begin with."""
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
        return log.since(position) if log.start <= position <= log.end else None

    def note(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """`rank` dropped these."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.note(hashes)

    def forget(self, rank: WorkerRank) -> None:
        """It holds nothing any more, or is known anew."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.end += 1
        log.start = log.end

    def drop(self, rank: WorkerRank) -> None:
        """It is no more."""
        self._logs.pop(rank, None)


class _Log:
    """A ring, which grows until it has room for `most`: as events bring them, one or a few at a time, each as an array
    of its own would take thirty times as much memory."""

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
        """Past the ring's end. Of more than there is room for, the last."""
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
