"""Which column of the books that several processes share is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from indexer.types import WorkerRank

RANKS_PER_WORKER: Final = 512
"""Columns set aside for each worker, since nobody knows its data-parallel size before it answers."""


class Columns:
    def __init__(self, workers: Sequence[str]) -> None:
        """The same names in the same order in each process."""
        self._workers = workers
        self._bases = {worker: number * RANKS_PER_WORKER for number, worker in enumerate(workers)}

    def __len__(self) -> int:
        return len(self._workers) * RANKS_PER_WORKER

    def of(self, rank: WorkerRank) -> int:
        if rank.dp_rank >= RANKS_PER_WORKER:
            raise ValueError(f"{rank} is beyond the {RANKS_PER_WORKER} ranks of a worker that --processes can share.")
        return self._bases[rank.worker_id] + rank.dp_rank

    def rank_at(self, column: int) -> WorkerRank:
        number, dp_rank = divmod(column, RANKS_PER_WORKER)
        return WorkerRank(self._workers[number], dp_rank)
