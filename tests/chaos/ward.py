"""Who may be ill: so many workers at a time, so that somebody is always well (pure)."""

from __future__ import annotations

import random

STAY = 40
"""Times that a worker may be struck before it must recover, so that all have their turn."""


class Ward:
    def __init__(self, workers: int, beds: int, draw: random.Random) -> None:
        self._workers = range(workers)
        self._beds = beds
        self._draw = draw
        self._patients: dict[int, int] = {}
        """Worker to how much it suffers from at once."""
        self._stays: dict[int, int] = {}
        """Worker to how often it was struck since it was last well."""
        self._closed: set[int] = set()
        self.returning: set[int] = set()
        """Struck by nothing new until they have served again."""

    @property
    def well(self) -> int:
        return len(self._workers) - len(self._patients)

    def admit(self, alone: bool = False) -> int | None:
        """A worker that may be struck now; None when all beds are taken. `alone`: by nothing of its kind meanwhile."""
        open_to = [worker for worker in self._workers if worker not in self.returning]
        if alone:
            open_to = [worker for worker in open_to if worker not in self._closed]
        else:
            open_to = [worker for worker in open_to if self._stays.get(worker, 0) < STAY]
        if len(self._patients) >= self._beds:
            open_to = [worker for worker in open_to if worker in self._patients]
        if not open_to:
            return None
        worker = self._draw.choice(open_to)
        self._patients[worker] = self._patients.get(worker, 0) + 1
        self._stays[worker] = self._stays.get(worker, 0) + 1
        if alone:
            self._closed.add(worker)
        return worker

    def discharge(self, worker: int, alone: bool = False) -> None:
        self._patients[worker] -= 1
        if not self._patients[worker]:
            del self._patients[worker], self._stays[worker]
        if alone:
            self._closed.discard(worker)
