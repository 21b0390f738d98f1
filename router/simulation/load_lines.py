"""When loads of simulated workers are done: each worker loads for one request at a time."""

from __future__ import annotations

from indexer.types import WorkerRank


class LoadLines:
    def __init__(self) -> None:
        self._free_at: dict[WorkerRank, float] = {}
        """When each worker will have finished its loads."""

    def add(self, rank: WorkerRank, now: float, seconds: float) -> float:
        """When a load of so many `seconds` will be done, behind those before it."""
        done = self._free_at[rank] = max(now, self._free_at.get(rank, 0.0)) + seconds
        return done

    def lose(self, rank: WorkerRank) -> None:
        self._free_at.pop(rank, None)
