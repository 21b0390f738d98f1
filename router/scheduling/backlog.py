"""The prefill work that this router has sent to each rank and that is not done yet, in seconds of a rank of factor 1.

An engine computes prompts in the order of their arrival, so the time between two first tokens of a rank is what the
later prefill took. The latency model learns from that. The first prefill in line is under way: the time since it became
first counts as done, and once it is overdue it is expected to take as long again as it is late.

Work does not include the fixed cost of a step, since prefills in line share steps; only the step that is under way
counts. A prefill whose KV is first loaded from a store joins the line when the load should be done, as others are
computed meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from itertools import count

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.candidates import Seconds
from router.scheduling.figures import (
    ADDED,
    BACKLOG_ROWS,
    HEAD,
    LATELY,
    LATELY_MEMORY,
    MICRO,
    SINCE,
    WORK,
    Tables,
    seconds_left,
)
from router.scheduling.load import SharedTable
from router.scheduling.places import Places, Positions


class Entry:
    """One prefill in line."""

    __slots__ = ("done", "loaded", "place", "sent", "work")

    def __init__(self, place: int, work: float, sent: float, loaded: bool) -> None:
        self.done = False
        """Taken out of the line, or never to join it."""
        self.loaded = loaded
        """KV is loaded before it can begin."""
        self.place = place
        self.work = work
        """Seconds on a rank of factor 1."""
        self.sent = sent


class Backlog:
    def __init__(self, shared: SharedTable | None = None) -> None:
        """`shared`: the table of several router processes; a rank's backlog is the sum over them."""
        self._places = Places(shared.claim, shared.release) if shared else Places()
        self._lines: dict[int, deque[Entry]] = {}
        self._progress: dict[int, float] = {}
        """By place, when its latest first token came: no later prefill began before."""
        self._later: list[tuple[float, int, Entry]] = []
        """A heap of prefills that join their line later, with the time of that."""
        self._numbers = count()
        self._tables = shared.tables if shared else np.zeros((1, BACKLOG_ROWS, 17), np.int64)
        self._own = shared.own if shared else 0
        self._rows = self._views()
        self.wanted = True
        """False while nobody reads the backlog: then callers need not keep it. The first reader sets it."""

    def _views(self) -> list[memoryview[int]]:
        """Rows as memoryviews, where single numbers are read and written in half the time."""
        return [row.data for row in self._tables[self._own]]

    def watch(self, rank: WorkerRank) -> None:
        place = self._places.add(rank)
        if place >= self._tables.shape[2] - 1:  # the last column stands for ranks without a place and stays 0
            grown = np.zeros((1, BACKLOG_ROWS, 2 * place + 2), np.int64)
            grown[:, :, : self._tables.shape[2]] = self._tables
            self._tables = grown
            self._rows = self._views()

    def forget(self, rank: WorkerRank) -> None:
        """Prefills that are still in line there end without effect."""
        place = self._places.drop(rank)
        if place is not None:
            later = [entry for _, _, entry in self._later if entry.place == place]
            for entry in [*self._lines.pop(place, ()), *later]:
                entry.done = True
            self._progress.pop(place, None)
            self._tables[self._own, :, place] = 0
            self._places.free(place)

    def add(self, rank: WorkerRank, work: float, now: float, joins: float | None = None) -> Entry:
        """`work`: seconds on a rank of factor 1. `joins`: when the prefill can begin, if not now."""
        place = self._places.get(rank)
        if place is None:
            raise KeyError(rank)
        self._count_recent(place, work, now)
        entry = Entry(place, work, now, joins is not None)
        if joins is None:
            self._join(entry, now)
        else:
            heappush(self._later, (joins, next(self._numbers), entry))
        return entry

    def _count_recent(self, place: int, work: float, now: float) -> None:
        """Add `work` to what the rank was sent lately, done or not."""
        lately, added, moment = self._rows[LATELY], self._rows[ADDED], int(now * MICRO)
        left = math.exp((added[place] - moment) / (LATELY_MEMORY * MICRO)) * lately[place] if lately[place] else 0.0
        lately[place], added[place] = int(left + work * MICRO), moment

    def _join(self, entry: Entry, now: float) -> None:
        line = self._lines.setdefault(entry.place, deque())
        line.append(entry)
        self._rows[WORK][entry.place] += int(entry.work * MICRO)
        if len(line) == 1:
            self._begin(entry.place, now)

    def _advance(self, now: float) -> None:
        """Let those join their line whose KV should be loaded by now."""
        while self._later and self._later[0][0] <= now:
            joins, _, entry = heappop(self._later)
            if not entry.done:
                self._join(entry, joins)

    def _begin(self, place: int, now: float) -> None:
        """From now on the first in line, if there is one, is under way."""
        line = self._lines[place]
        rows = self._rows
        rows[HEAD][place] = int(line[0].work * MICRO) if line else 0
        rows[SINCE][place] = int(now * MICRO)

    def done(self, entry: Entry, now: float) -> float | None:
        """The first token is there. Returns the seconds that the rank spent on this prefill alone; None if it was
        forgotten."""
        self._advance(now)
        overtakes = self._overtakes(entry)
        if not self._remove(entry, now):
            return None
        began = max(entry.sent, self._progress.get(entry.place, entry.sent))
        if not overtakes:
            self._progress[entry.place] = max(began, now)
        return max(0.0, now - began)

    def _overtakes(self, entry: Entry) -> bool:
        """Whether its KV was loaded, so that its first token came in the middle of another prefill."""
        line = self._lines.get(entry.place)
        return bool(entry.loaded and line and line[0] is not entry)

    def drop(self, entry: Entry, now: float) -> None:
        """The request ended without a first token."""
        self._advance(now)
        self._remove(entry, now)

    def _remove(self, entry: Entry, now: float) -> bool:
        """Returns whether it was still in line."""
        if entry.done:
            return False
        entry.done = True
        line = self._lines.get(entry.place)
        if line is None or entry not in line:  # it has not joined yet
            return True
        first = line[0] is entry
        line.remove(entry)
        self._rows[WORK][entry.place] -= int(entry.work * MICRO)
        if first:
            self._begin(entry.place, now)
        return True

    def seconds(self, ranks: RankSet, factors: Seconds, now: float, base: float = 0.0) -> Seconds:
        """Seconds until a request sent to each of `ranks` now would begin. `factors`: of the ranks; `base`: fixed cost
        of the step that is under way."""
        return seconds_left(*self.columns(ranks, now), factors, base, now)

    def columns(self, ranks: RankSet, now: float) -> tuple[Tables, Positions]:
        """The first two arguments of `seconds_left`."""
        self._advance(now)
        return self._tables, self._places.of(ranks)

    def busy(self, ranks: RankSet, now: float) -> float:
        """Share of `ranks` (0–1) that have work left."""
        self._advance(now)
        work = self._tables[:, WORK, self._places.of(ranks)].max(axis=0)
        return float(np.count_nonzero(work)) / max(1, len(ranks))
