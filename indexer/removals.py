"""The latest blocks that each rank has removed, so that the audit can tell whether a missing block was announced."""

from __future__ import annotations

from typing import Final

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank

KEPT: Final = 16_384
"""Blocks per rank (128 kB): some seconds of a full cache that is replaced within a minute."""

_SMALLEST: Final = 64
"""Blocks in a new ring."""
_NONE = np.zeros(0, np.uint64)


class Removals:
    """A bounded log for each rank. A position in the log stands for a moment."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._logs: dict[WorkerRank, _Log] = {}

    def position(self, rank: WorkerRank) -> int:
        log = self._logs.get(rank)
        return log.end if log else 0

    def since(self, rank: WorkerRank, position: int) -> SequenceHashes | None:
        """The blocks removed since `position`; None if the log does not reach back so far, or all blocks were
        removed."""
        log = self._logs.get(rank)
        if log is None:
            return None if position else _NONE
        return log.since(position) if log.start <= position <= log.end else None

    def note(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """`rank` has removed these."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.note(hashes)

    def forget(self, rank: WorkerRank) -> None:
        """`rank` holds nothing any more, or was learned anew."""
        log = self._logs.get(rank)
        if log is None:
            log = self._logs[rank] = _Log(self._kept)
        log.end += 1
        log.start = log.end

    def drop(self, rank: WorkerRank) -> None:
        """`rank` has left."""
        self._logs.pop(rank, None)


class _Log:
    """A ring that grows up to `most` blocks. (A list with an array per event would take thirty times the memory.)"""

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
