"""The held requests and their order, as columns: a pass over a thousand of them takes a tenth of a millisecond.

The order is by priority, then by tenant, then by the highest response ratio (Brinch Hansen 1971): (waited + own work) /
own work. Short work goes first, which keeps the mean wait low, and everybody's ratio grows with waiting, so that
nothing starves. Of several tenants, the one that was served least goes first (`shares`); its request then counts as
served for those behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from router.scheduling.candidates import Seconds

Who = TypeVar("Who")
Rows = npt.NDArray[np.intp]

_LEAST_WORK: Final = 1e-3
"""Seconds that any request counts for, so that response ratios are finite and no tenant is served for nothing."""
# Fields of a request in the table of seconds: three of its `Entry`, then two that the latest look found (`Line.see`).
_ARRIVED, _SINCE, _LIMIT, _WORK, _CHARGE = range(5)
# Fields in the table of numbers: two of its `Entry`, its lane, and its target.
_PRIORITY, _TENANT, _LANE, _PART, _POSITION = range(5)
_FIRST_ROWS: Final = 16
"""Requests that there is room for at first."""
_PIECE: Final = 64
"""Requests that `order` reads from the table at a time."""
_NOWHERE: Final = -1
"""The position of a request that had no candidate with room at the last look."""


class Target(NamedTuple):
    """The candidate that a held request would go to."""

    part: int
    """An index of `Candidates.parts`: 0 for ranks that serve requests whole, 1 for those that prefill for others."""
    position: int


Spot: TypeAlias = tuple[int, int, int]
"""A held request's lane and, as of the last look, its target: part and position (`_NOWHERE`: none had room)."""


class Entry(NamedTuple):
    """What stays the same while a request waits; times in seconds."""

    arrived: float
    since: float
    """When it was put into the queue."""
    limit: float
    """Seconds after arrival at which its objective is missed."""
    priority: int
    tenant: int
    """Its number in `shares`."""


class Line(Generic[Who]):
    """Each held request has a row, in the order of arrival here."""

    def __init__(self) -> None:
        self._who: list[Who | None] = [None] * _FIRST_ROWS
        self._held = np.zeros(_FIRST_ROWS, np.bool_)
        """Which rows are those of requests that have not left."""
        self._seconds = np.zeros((5, _FIRST_ROWS))
        self._numbers = np.zeros((5, _FIRST_ROWS), np.int64)
        self._used = 0
        self._rows: dict[Who, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, who: Who) -> bool:
        return who in self._rows

    def add(self, who: Who, entry: Entry, lane: int) -> None:
        if self._used == len(self._who):
            self._make_room()
        row = self._rows[who] = self._used
        self._used += 1
        self._who[row], self._held[row] = who, True
        self._seconds[:, row] = entry.arrived, entry.since, entry.limit, 0.0, _LEAST_WORK
        self._numbers[:, row] = entry.priority, entry.tenant, lane, 0, _NOWHERE

    def see(self, who: Who, work: float, charge: float, target: Target | None) -> None:
        """Note what a look at the request has found: the seconds of its prefill, those that its tenant would be
        charged, and its target (None: no candidate had room)."""
        row = self._rows[who]
        self._seconds[_WORK, row], self._seconds[_CHARGE, row] = work, max(_LEAST_WORK, charge)
        self._numbers[_PART, row], self._numbers[_POSITION, row] = target or (0, _NOWHERE)

    def move(self, who: Who, lane: int, target: Target | None = None) -> None:
        """Move to another lane, with its target there; None: it has none yet."""
        part, position = target or (0, _NOWHERE)
        self._numbers[_LANE : _POSITION + 1, self._rows[who]] = lane, part, position

    def spot(self, who: Who) -> Spot:
        lane, part, position = self._numbers[_LANE:, self._rows[who]].tolist()
        return lane, part, position

    def lane(self, who: Who) -> int:
        return int(self._numbers[_LANE, self._rows[who]])

    def work(self, who: Who) -> float:
        return float(self._seconds[_WORK, self._rows[who]])

    def remove(self, who: Who) -> tuple[int, int]:
        """Returns its tenant and its lane."""
        row = self._rows.pop(who)
        self._who[row], self._held[row] = None, False
        return int(self._numbers[_TENANT, row]), int(self._numbers[_LANE, row])

    def _make_room(self) -> None:
        """Drop the rows of requests that have left; double the table if the others still fill more than half."""
        rows = self._held_rows()
        size = len(self._who) * (2 if 2 * len(rows) > len(self._who) else 1)
        seconds, numbers = np.zeros((5, size)), np.zeros((5, size), np.int64)
        seconds[:, : len(rows)], numbers[:, : len(rows)] = self._seconds[:, rows], self._numbers[:, rows]
        self._seconds, self._numbers, self._used = seconds, numbers, len(rows)
        self._rows = {who: row for row, who in enumerate(self._rows)}
        self._who = [*self._rows, *[None] * (size - len(rows))]
        self._held = np.arange(size) < len(rows)

    def _held_rows(self) -> Rows:
        rows: Rows = np.flatnonzero(self._held)
        return rows

    def _requests_in(self, rows: Rows) -> list[Who]:
        return [who for row in rows.tolist() if (who := self._who[row]) is not None]

    # -- order

    def order(self, now: float, lanes: Collection[int], served: Seconds | None) -> Iterator[tuple[Who, Spot]]:
        """The requests that are in `lanes` now, first to last. `served`: tenants' counters; None if there is only one
        tenant."""
        if not lanes:
            return iter(())
        rows = self._held_rows()
        rows = rows[np.isin(self._numbers[_LANE, rows], list(lanes))]
        ratios, priorities = self._ratios(rows, now), self._numbers[_PRIORITY, rows]
        if served is None:
            return self._with_spots(rows[np.lexsort((-ratios, priorities))])
        tags = self._tags(rows, ratios, served)
        return self._with_spots(rows[np.lexsort((-ratios, tags, priorities))])

    def _with_spots(self, rows: Rows) -> Iterator[tuple[Who, Spot]]:
        """Piece by piece, as most passes end after a few. Those that leave meanwhile are left out."""
        everybody, spots = self._who, self._numbers[_LANE:, rows]
        for first in range(0, len(rows), _PIECE):
            lanes, parts, positions = spots[:, first : first + _PIECE].tolist()
            places = zip(lanes, parts, positions, strict=True)
            for row, spot in zip(rows[first : first + _PIECE].tolist(), places, strict=True):
                who = everybody[row]
                if who is not None:
                    yield who, spot

    def _ratios(self, rows: Rows, now: float) -> Seconds:
        """Response ratios less 1, which have the same order."""
        seconds = self._seconds
        ratios: Seconds = (now - seconds[_ARRIVED, rows]) / np.maximum(_LEAST_WORK, seconds[_WORK, rows])
        return ratios

    def _tags(self, rows: Rows, ratios: Seconds, served: Seconds) -> Seconds:
        """For each row, the counter that its tenant will have when the request's turn comes."""
        tenants = self._numbers[_TENANT, rows]
        order = np.lexsort((-ratios, self._numbers[_PRIORITY, rows], tenants))
        charges, sorted_ = self._seconds[_CHARGE, rows][order], tenants[order]
        before = charges.cumsum() - charges
        firsts = np.searchsorted(sorted_, sorted_)
        tags = np.empty(len(rows))
        tags[order] = served[sorted_] + before - before[firsts]
        return tags

    def work_before(
        self, then: float, priority: int, lane: int, target: Target, standing: tuple[int, Seconds] | None
    ) -> float:
        """Seconds of work for `target` that will go before a request which arrives now. The order is that of `then`,
        when the request has waited as long as its own work takes. `standing`: its tenant's number and all counters;
        None if there is only one tenant."""
        rows, numbers = self._rows_before(then, priority, standing), self._numbers
        there = (numbers[_LANE, rows] == lane) & (numbers[_PART, rows] == target.part)
        rows = rows[there & (numbers[_POSITION, rows] == target.position)]
        works: list[float] = self._seconds[_WORK, rows].tolist()
        return sum(works)

    def _rows_before(self, then: float, priority: int, standing: tuple[int, Seconds] | None) -> Rows:
        """The rows of requests that go before the new one of `work_before`, wherever they would go."""
        rows = self._held_rows()
        ratios, priorities = self._ratios(rows, then), self._numbers[_PRIORITY, rows]
        sooner = ratios > 1.0  # the new request's own at `then`
        if standing:
            tenant, served = standing
            own = self._numbers[_TENANT, rows] == tenant
            own_before = rows[own & self._goes_first(priorities, sooner, priority)]
            tag = served[tenant] + self._seconds[_CHARGE, own_before].sum()
            sooner = np.where(own, sooner, self._tags(rows, ratios, served) <= tag)
        before: Rows = rows[self._goes_first(priorities, sooner, priority)]
        return before

    @staticmethod
    def _goes_first(
        priorities: npt.NDArray[np.int64], sooner: npt.NDArray[np.bool_], priority: int
    ) -> npt.NDArray[np.bool_]:
        """By priority, and where that is the same, who is `sooner`."""
        first: npt.NDArray[np.bool_] = (priorities < priority) | ((priorities == priority) & sooner)
        return first

    def last(self, tenant: int) -> tuple[int, Who]:
        """The tenant's request that goes last if all of them had the same work, with its priority: (priority,
        request)."""
        rows = self._held_rows()
        rows = rows[self._numbers[_TENANT, rows] == tenant]
        priorities = self._numbers[_PRIORITY, rows]
        row = rows[priorities == priorities.max()][-1]
        return int(self._numbers[_PRIORITY, row]), self._requests_in(row.reshape(1))[0]

    # -- time

    def waited(self, who: Who, now: float) -> float:
        return now - float(self._seconds[_SINCE, self._rows[who]])

    def waited_over(self, seconds: float, now: float) -> list[Who]:
        rows = self._held_rows()
        return self._requests_in(rows[now - self._seconds[_SINCE, rows] > seconds])

    def past_limit(self, now: float) -> list[Who]:
        rows = self._held_rows()
        return self._requests_in(rows[now - self._seconds[_ARRIVED, rows] > self._seconds[_LIMIT, rows]])

    # -- work

    def by_lane(self, without: set[Who]) -> Iterator[tuple[int, Rows]]:
        """Each lane that has requests with a target which are not in `without`, and the rows of these."""
        those = self._held & (self._numbers[_POSITION] >= 0)
        those[self._rows_of(without)] = False
        rows = np.flatnonzero(those)
        rows = rows[np.argsort(self._numbers[_LANE, rows], kind="stable")]
        lanes, starts = np.unique(self._numbers[_LANE, rows], return_index=True)
        return zip(lanes.tolist(), np.split(rows, starts[1:]), strict=False)  # of none there is one empty piece

    def add_work(self, works: Seconds, part: int, rows: Rows) -> None:
        """Add the work of the requests in `rows`, which have targets, to `works`, at the position that each would
        take."""
        numbers = self._numbers
        rows = rows[numbers[_PART, rows] == part]
        np.add.at(works, numbers[_POSITION, rows], self._seconds[_WORK, rows])

    def rows_with_target(self, those: Iterable[Who]) -> Rows:
        """The rows of those that are still held and have a target."""
        held = self._rows_of(those)
        rows: Rows = held[self._numbers[_POSITION, held] >= 0]
        return rows

    def _rows_of(self, those: Iterable[Who]) -> Rows:
        """The rows of those that are still held."""
        return np.array([row for who in those if (row := self._rows.get(who)) is not None], np.intp)
