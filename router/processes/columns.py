"""Assigns ranks to columns of the load tables that several router processes share.

A rank gets a column from the process that first hears of it, and keeps it while any process uses it. Taking a column
locks the file that all processes have mapped; that is rare, and takes microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from indexer.types import WorkerRank
from router.scheduling.places import NoPlace


class Columns:
    def __init__(self, names: npt.NDArray[np.uint64], users: npt.NDArray[np.int64], own: int, descriptor: int) -> None:
        """`names`: for each column the hash of its rank, 0 for one never used. `users`: a row for each process, with 1
        for the columns that it uses; `own` is this process's row. `descriptor`: of the file to lock."""
        self._names = names
        self._users = users
        self._own = own
        self._descriptor = descriptor
        self._ranks: dict[int, WorkerRank] = {}
        self._columns: dict[WorkerRank, int] = {}
        self._uses: Counter[int] = Counter()

    def claim(self, rank: WorkerRank) -> int:
        """The rank's column, the same in all processes, until it was released as often as claimed. Raises NoPlace when
        none is left."""
        column = self._columns.get(rank)
        if column is None:
            with self._locked():
                column = self._take(rank)
            self._ranks[column], self._columns[rank] = rank, column
        self._uses[column] += 1
        return column

    def _take(self, rank: WorkerRank) -> int:
        name = _name(rank)
        found = np.flatnonzero(self._names == name)
        if not len(found):
            found = np.flatnonzero(~self._users.any(axis=0))
        if not len(found):
            raise NoPlace(f"with its ranks there are more than the {len(self._names)} that --processes can share")
        column = int(found[0])
        self._names[column] = name
        self._users[self._own, column] = 1
        return column

    def release(self, column: int) -> None:
        self._uses[column] -= 1
        if not self._uses[column]:
            del self._uses[column], self._columns[self._ranks.pop(column)]
            self._users[self._own, column] = 0

    def get(self, rank: WorkerRank) -> int | None:
        """The column of a rank that this process has claimed."""
        return self._columns.get(rank)

    def rank_at(self, column: int) -> WorkerRank | None:
        """None where this process has not claimed the column."""
        return self._ranks.get(column)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _name(rank: WorkerRank) -> int:
    """Never 0. If two ranks have the same by chance (one time in 10¹³ among a thousand ranks) they share a column."""
    return xxhash.xxh3_64_intdigest(f"{rank.worker_id}\0{rank.dp_rank}".encode()) or 1
