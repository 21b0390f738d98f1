"""The metrics aggregator: the load of each rank, from its latest report and from what this router has sent it.

Reports lag, and bookings change at once. So the load at any moment is the router's own bookings plus the *foreign* load
(other routers, direct clients). The foreign load is the part of the latest report that cannot be ours, where ours may
be the most that was booked at any moment since the report before: a request that has just ended may still be in the
report, and must not be taken for a foreign one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.events import LoadReport
from indexer.types import RankSet, WorkerRank
from router.scheduling.adapters import Adapters
from router.scheduling.decision import UNBOUNDED
from router.scheduling.figures import (
    ACTIVE,
    BEFORE_ACTIVE,
    BEFORE_SEQUENCES,
    BEYOND,
    FOREIGN_REQUESTS,
    FOREIGN_TOKENS,
    FURTHER,
    LOAD_ROWS,
    MOST_ACTIVE,
    MOST_SEQUENCES,
    NEW,
    PREFILL,
    REQUESTS,
    Tables,
    sum_loads,
)
from router.scheduling.places import Places, Positions

REPORT_LIFE = 10.0
"""Seconds for which a report is valid: ten times the default interval between reports."""


class Load(NamedTuple):
    """Requests and tokens in flight at a rank."""

    requests: int = 0
    """Of one with several prompts or answers (`n`) each answer counts, as it does to the engine."""
    prefill_tokens: int = 0
    """Prompt tokens still to be computed, of requests that have no first token yet."""
    active_tokens: int = 0
    """Tokens (prompt and generated) of all requests in flight, which each decode step reads."""


class Metrics(NamedTuple):
    """One rank's load, its latest report (the latest with figures, where there was one) and the age of that in seconds;
    both None while there is no report."""

    load: Load
    report: LoadReport | None
    age: float | None


class Loads(NamedTuple):
    """`Load` of several ranks: an array for each figure."""

    requests: npt.NDArray[np.int64]
    """As in `Load`."""
    prefill_tokens: npt.NDArray[np.int64]
    active_tokens: npt.NDArray[np.int64]
    own_requests: npt.NDArray[np.int64]
    """Requests of the routers that share these books, each counted once."""
    memory_tokens: npt.NDArray[np.int64]
    """KV memory in use by requests in flight; shared blocks count once as far as reports tell."""
    capacity_tokens: npt.NDArray[np.int64]
    """KV memory in all; `UNBOUNDED` where none was reported."""
    slots: npt.NDArray[np.int64]
    """Requests that the rank runs at a time; `UNBOUNDED` where that was not reported."""


class Reservation:
    """One request's booking on one rank. The response stream owns it, and releases it however the request ends."""

    __slots__ = ("_active_tokens", "_book", "_further", "_new_tokens", "_place", "_prefill_tokens", "_released")

    def __init__(
        self, book: LoadBook, place: int, prefill_tokens: int, prompt_tokens: int, new_tokens: int, further: int
    ) -> None:
        self._book = book
        self._place = place
        self._prefill_tokens = prefill_tokens
        self._new_tokens = new_tokens
        self._active_tokens = prompt_tokens
        self._further = further
        self._released = False
        book.book(place, 1, prefill_tokens, prompt_tokens, new_tokens, further)

    @property
    def released(self) -> bool:
        return self._released

    def first_token(self) -> None:
        """The prefill is done. Does nothing a second time, or after the release."""
        if self._prefill_tokens:
            self._book.book(self._place, 0, -self._prefill_tokens, 0, 0)
            self._prefill_tokens = 0

    def generated(self, tokens: int) -> None:
        if not self._released:
            self._active_tokens += tokens
            self._new_tokens += tokens
            self._book.book(self._place, 0, 0, tokens, tokens)

    def release(self) -> None:
        """Give everything back; a second time does nothing."""
        if self._released:
            return
        self._released = True
        tokens = -self._prefill_tokens, -self._active_tokens, -self._new_tokens
        self._book.book(self._place, -1, *tokens, -self._further)
        self._prefill_tokens = 0


class SharedTable(NamedTuple):
    """The table of several router processes: each writes rows of its own and reads those of all."""

    tables: npt.NDArray[np.int64]
    """[process, row, place], zeros at first; the last place stands for unknown ranks."""
    own: int
    """The index in `tables` of this process."""
    claim: Callable[[WorkerRank], int]
    """Gives a rank the same place in each process ..."""
    release: Callable[[int], None]
    """... until it is released as often as it was claimed."""


class LoadBook:
    """The books of all watched ranks, as columns of one table. An unknown rank has no load."""

    def __init__(self, shared: SharedTable | None = None) -> None:
        self._places = Places(shared.claim, shared.release) if shared else Places()
        self._retired: set[int] = set()
        """Places of forgotten ranks that still have bookings in flight."""
        self._block_sizes: dict[WorkerRank, int] = {}
        self._reports: dict[WorkerRank, LoadReport] = {}
        self._reported_at = np.full(1, -np.inf)
        self._limits = np.full((3, 1), UNBOUNDED)
        """Rows: tokens of KV memory in all; requests that the engine runs at a time, now (its memory may be full) and
        at most."""
        self._oldest = np.inf
        """When the oldest report came of which anything may have to expire; infinite if there is none."""
        self.adapters = Adapters()
        self._table = shared.tables[shared.own] if shared else np.zeros((LOAD_ROWS, 1), np.int64)
        self._all_tables = shared.tables if shared else None
        self._own = shared.own if shared else 0
        self._resize(self._table.shape[1] - 1 if shared else 16)

    def _resize(self, columns: int) -> None:
        """The last column stays 0: it stands for unknown ranks."""
        times = np.full(columns + 1, -np.inf)
        old = len(self._reported_at) - 1
        times[:old] = self._reported_at[:old]
        self._reported_at = times
        limits = np.full((3, columns + 1), UNBOUNDED)
        limits[:, :old] = self._limits[:, :old]
        self._limits = limits
        if self._all_tables is None:
            table = np.zeros((LOAD_ROWS, columns + 1), np.int64)
            table[:, :old] = self._table[:, :old]
            self._table = table
        self._tables = self._table[None] if self._all_tables is None else self._all_tables
        self._rows = [row.data for row in self._table]  # single numbers are read and written there in half the time

    def watch(self, rank: WorkerRank, block_size: int) -> None:
        """Keep books of `rank`, whose reports count blocks of `block_size` tokens.

        If it was watched before, bookings in flight stay, but its last report and its limits are forgotten: it may be
        another engine by now, whose reports may not have all those figures.
        """
        place = self._places.add(rank)
        self._block_sizes[rank] = block_size
        self._reports.pop(rank, None)
        self.adapters.forget(rank)
        if place in self._retired:  # in shared books a rank gets the place back that it had, and then holds it twice
            self._retired.discard(place)
            self._places.free(place)
        if place >= len(self._reported_at) - 1:
            self._resize(2 * place)
        self._limits[:, place] = UNBOUNDED

    def forget(self, rank: WorkerRank) -> None:
        """Bookings in flight stay valid; the rank's place becomes free when the last of them ends."""
        place = self._places.drop(rank)
        if place is None:
            return
        del self._block_sizes[rank]
        self._reports.pop(rank, None)
        self.adapters.forget(rank)
        self._reported_at[place] = -np.inf
        self._limits[:, place] = UNBOUNDED
        self._table[FOREIGN_REQUESTS : BEYOND + 1, place] = 0
        if self._rows[REQUESTS][place]:
            self._retired.add(place)
        else:
            self._free(place)

    def _free(self, place: int) -> None:
        self._table[:, place] = 0
        self._places.free(place)

    def reserve(
        self,
        rank: WorkerRank,
        prefill_tokens: int,
        prompt_tokens: int,
        new_tokens: int | None = None,
        further: int = 0,
    ) -> Reservation:
        """`new_tokens`: tokens that need new KV memory; None: `prefill_tokens`. `further`: sequences beyond the
        first."""
        place = self._places.get(rank)
        if place is None:
            raise KeyError(rank)
        new = prefill_tokens if new_tokens is None else new_tokens
        return Reservation(self, place, prefill_tokens, prompt_tokens, new, further)

    def book(
        self, place: int, requests: int, prefill_tokens: int, active_tokens: int, new_tokens: int, further: int = 0
    ) -> None:
        """Change the own load at `place` by these amounts; for reservations only."""
        own, prefill, active, new, beyond_one, most_sequences, most_active, *_ = self._rows
        prefill[place] += prefill_tokens
        new[place] += new_tokens
        active[place] = tokens = active[place] + active_tokens
        if tokens > most_active[place]:  # noqa: PLR1730 -- a call of max() costs more than the rest
            most_active[place] = tokens
        if not requests:
            return
        own[place] = count = own[place] + requests
        beyond_one[place] = others = beyond_one[place] + further
        if count + others > most_sequences[place]:
            most_sequences[place] = count + others
        elif not count and place in self._retired:
            self._retired.discard(place)
            self._free(place)

    def on_report(self, report: LoadReport, now: float) -> None:
        rank = report.rank
        place = self._places.get(rank)
        if place is None:
            return
        before = self._reports.get(rank)
        if before and not _has_figures(report) and _has_figures(before):
            return  # an overloaded engine did not answer in time: the figures before stay valid until they expire
        self._reports[rank] = report
        self._reported_at[place] = now
        reported_tokens = (report.kv_active_blocks or 0) * self._block_sizes[rank]
        self._note_limits(report, reported_tokens, place)
        self.adapters.on_report(report)
        self._note_foreign_load(report, reported_tokens, place)
        self._oldest = min(self._oldest, now)
        self._count_most_anew(place)

    def _note_limits(self, report: LoadReport, reported_tokens: int, place: int) -> None:
        limits = self._limits
        if report.kv_total_blocks:
            limits[0, place] = report.kv_total_blocks * self._block_sizes[report.rank]
        if report.request_total_slots:
            limits[2, place] = report.request_total_slots
        full = self._is_full(report, reported_tokens, place)
        limits[1, place] = report.request_active_slots if full else limits[2, place]

    def _note_foreign_load(self, report: LoadReport, reported_tokens: int, place: int) -> None:
        rows = self._rows
        reported = (report.request_active_slots or 0) + (report.num_requests_waiting or 0)
        requests = max(0, reported - self._most(MOST_SEQUENCES, BEFORE_SEQUENCES, place))
        # Without foreign requests, blocks beyond our own are rounding and requests just ended, not load.
        tokens = max(0, reported_tokens - self._most(MOST_ACTIVE, BEFORE_ACTIVE, place)) if requests else 0
        rows[FOREIGN_REQUESTS][place], rows[FOREIGN_TOKENS][place] = requests, tokens
        if report.kv_active_blocks is not None:
            rows[BEYOND][place] = reported_tokens - self._sum(NEW, place)

    def _count_most_anew(self, place: int) -> None:
        """A report has come: from now on, the most that is booked until the next one counts."""
        rows = self._rows
        sequences = rows[REQUESTS][place] + rows[FURTHER][place]
        rows[BEFORE_SEQUENCES][place], rows[MOST_SEQUENCES][place] = rows[MOST_SEQUENCES][place], sequences
        rows[BEFORE_ACTIVE][place], rows[MOST_ACTIVE][place] = rows[MOST_ACTIVE][place], rows[ACTIVE][place]

    def _is_full(self, report: LoadReport, tokens: int, place: int) -> bool:
        """Whether requests wait at the engine because its memory is full, so that it runs as many as it can for now:
        `tokens` are in use, and one more request like ours would not fit. Requests that it has preempted wait too, and
        use no memory."""
        own = self._sum(REQUESTS, place)
        if not (report.num_requests_waiting and report.request_active_slots and own):
            return False
        return bool(tokens + self._sum(NEW, place) / own > self._limits[0, place])

    def _expire(self, now: float) -> None:
        """Forget the foreign load and the fullness told by reports that are too old."""
        old = now - self._reported_at > REPORT_LIFE
        self._table[FOREIGN_REQUESTS : BEYOND + 1, old] = 0
        self._limits[1, old] = self._limits[2, old]
        full = self._limits[1] != self._limits[2]
        telling = self._reported_at[(self._table[FOREIGN_REQUESTS] > 0) | (self._table[BEYOND] != 0) | full]
        self._oldest = float(telling.min()) if len(telling) else np.inf

    def columns(self, ranks: RankSet, now: float) -> tuple[Tables, int, Positions, npt.NDArray[np.int64]]:
        """The arguments of `sum_loads`."""
        if now - self._oldest > REPORT_LIFE:
            self._expire(now)
        return self._tables, self._own, self._places.of(ranks), self._limits

    def loads(self, ranks: RankSet, now: float) -> Loads:
        """The load of each of `ranks`, in their order; `now` on the same clock as the reports' times."""
        return Loads(*sum_loads(*self.columns(ranks, now)))

    def load(self, rank: WorkerRank, now: float) -> Load:
        place = self._places.get(rank)
        if place is None:
            return Load()
        if now - self._oldest > REPORT_LIFE:
            self._expire(now)
        foreign_requests, foreign_tokens = self._rows[FOREIGN_REQUESTS][place], self._rows[FOREIGN_TOKENS][place]
        requests, further, prefill, active = (self._sum(row, place) for row in (REQUESTS, FURTHER, PREFILL, ACTIVE))
        return Load(requests + further + foreign_requests, prefill, active + foreign_tokens)

    def booked(self, rank: WorkerRank) -> int:
        """Requests of this process in flight at `rank`."""
        place = self._places.get(rank)
        return 0 if place is None else self._rows[REQUESTS][place]

    def _sum(self, row: int, place: int) -> int:
        """Over all processes."""
        return self._rows[row][place] if self._all_tables is None else int(self._all_tables[:, row, place].sum())

    def _most(self, most: int, before: int, place: int) -> int:
        """The most that all processes had booked at any moment since the last report. Other processes may have taken
        this report already and begun to count anew, so the higher of their two latest counts is used."""
        own = self._rows[most][place]
        if self._all_tables is None:
            return own
        return own + int(np.delete(self._all_tables[:, [most, before], place], self._own, 0).max(1).sum())

    @property
    def shared(self) -> bool:
        """Whether other processes book here too."""
        return self._all_tables is not None

    def own_requests(self) -> int:
        """Requests at all ranks together, of the routers that share these books."""
        rows = self._table[REQUESTS] if self._all_tables is None else self._all_tables[:, REQUESTS]
        return int(rows.sum())

    def get_metrics(self, now: float) -> dict[WorkerRank, Metrics]:
        """Latest load of every rank; `now` on the same clock as the reports' times."""
        return {rank: self._metrics(rank, place, now) for rank, place in self._places.ranks().items()}

    def metrics(self, rank: WorkerRank, now: float) -> Metrics | None:
        """`get_metrics` of one rank; None for an unknown one."""
        place = self._places.get(rank)
        return None if place is None else self._metrics(rank, place, now)

    def _metrics(self, rank: WorkerRank, place: int, now: float) -> Metrics:
        report = self._reports.get(rank)
        age = now - float(self._reported_at[place]) if report else None
        return Metrics(self.load(rank, now), report, age)


def _has_figures(report: LoadReport) -> bool:
    """Whether it says anything about what the engine has in flight."""
    figures = (report.request_active_slots, report.num_requests_waiting, report.kv_active_blocks)
    return figures != (None, None, None)


def subtract(counts: Counter[WorkerRank], rank: WorkerRank, count: int) -> None:
    """Take `count` from `rank`'s count, and drop it at 0."""
    counts[rank] -= count
    if not counts[rank]:
        del counts[rank]
