"""The held requests and the books that change with each of them: order, lanes, fair shares, pace, work ahead."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from indexer.types import WorkerRank
from router.scheduling.admission import QueueFull
from router.scheduling.candidates import Candidates, Seconds
from router.scheduling.decision import HeldWork
from router.scheduling.lanes import Lanes
from router.scheduling.limits import Limits
from router.scheduling.line import Entry, Line, Rows, Spot, Target
from router.scheduling.pace import Pace
from router.scheduling.shares import Shares
from router.scheduling.waiting import Waiting


class HeldRequests:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.line: Line[Waiting] = Line()
        self.lanes: Lanes[Waiting] = Lanes()
        self.shares = Shares()
        self._pace = Pace()
        self.work: HeldWork = {}
        """The work of all held requests, as of the last pass and with what was held since."""

    def add(
        self, waiting: Waiting, candidates: Candidates, now: float, limit: float, displaced: Waiting | None = None
    ) -> None:
        """Put the request in line, in place of `displaced`. `limit`: seconds after its arrival at which its objective
        is missed."""
        if displaced is not None:
            self._remove(displaced, 0.0)
        if not len(self.line):
            self._pace.begin(now)
        tenant, lane = self.shares.enter(waiting.tenant), self.lanes.enter(waiting, candidates)
        self.line.add(waiting, Entry(waiting.arrived, now, limit, waiting.priority, tenant), lane)

    def move(self, waiting: Waiting, candidates: Candidates, target: Target | None = None) -> None:
        """The request's candidates are these now, and of them it would go to `target`; None: that is not known yet."""
        before = self.line.lane(waiting)
        if candidates not in self.lanes or self.lanes.number(candidates) != before:
            self.line.move(waiting, self.lanes.enter(waiting, candidates), target)
            self.lanes.leave(waiting, before)

    def follow(self) -> bool:
        """Where the fleet has changed, move all held requests to the lanes of their present candidates; each keeps the
        rank that it would go to. Returns whether any was moved.

        Otherwise those that no pass considers for a while would stay in the old lanes, and the work that they have for
        a rank would not count as ahead of requests that arrive meanwhile.
        """
        positions: dict[Candidates, dict[WorkerRank, int]] = {}
        outdated = self.lanes.outdated()
        for before, those in outdated:
            for waiting in those:
                after = waiting.candidates()
                self.move(waiting, after, self._same_rank(self.line.spot(waiting), before, after, positions))
        return bool(outdated)

    @staticmethod
    def _same_rank(
        spot: Spot, before: Candidates, after: Candidates, positions: dict[Candidates, dict[WorkerRank, int]]
    ) -> Target | None:
        """Where the rank of `spot` is among the candidates `after`; None if it is not there. `positions`: a cache of
        each rank's position in a set of candidates."""
        _, part, position = spot
        if position < 0 or part >= len(after.parts):
            return None
        ranks = after.parts[part]
        known = positions.get(ranks)
        if known is None:
            known = positions[ranks] = {rank: place for place, rank in enumerate(ranks.ranks)}
        place = known.get(before.parts[part].ranks[position])
        return None if place is None else Target(part, place)

    def remove(self, waiting: Waiting, now: float, charge: float = 0.0) -> None:
        """It is held no longer. `charge`: seconds of prefill that its tenant got, if it was sent."""
        self._pace.leave(now)
        self._remove(waiting, charge)

    def _remove(self, waiting: Waiting, charge: float) -> None:
        tenant, lane = self.line.remove(waiting)
        self.lanes.leave(waiting, lane)
        self.shares.leave(tenant, charge)
        if not len(self.line):  # nobody waits: there is nothing ahead and nothing to share
            self.work = {}
            self.shares = Shares()

    # -- when too many are held

    def displaced_by(self, waiting: Waiting) -> Waiting | None:
        """Which request has to leave for `waiting`: the last one of the tenant with the most held requests, which may
        be `waiting` itself. None: the queue is not full."""
        limit = self._limits.max_queue
        if limit is None or len(self.line) < limit:
            return None
        own = self.shares.waiting(waiting.tenant)
        most, tenant = self.shares.most() if len(self.line) else (0, 0)
        if most > own + 1:
            return self.line.last(tenant)[1]
        if not own:
            return waiting
        priority, last = self.line.last(self.shares.number(waiting.tenant))
        return last if priority > waiting.priority else waiting

    def full(self, now: float) -> QueueFull:
        return QueueFull(len(self.line), self.retry_after(now))

    def retry_after(self, now: float) -> int:
        """Seconds until all requests held now have left, or have reached the queue timeout."""
        seconds = min(self._pace.seconds(len(self.line), now), self._limits.queue_timeout or math.inf)
        return max(1, math.ceil(seconds))

    # -- work, in seconds of prefill

    def work_before(self, waiting: Waiting, candidates: Candidates, target: Target, then: float) -> float:
        """Held work for the same rank that goes before a new request. `then`: see `Line.work_before`."""
        if candidates not in self.lanes:
            return 0.0
        shares, lane = self.shares, self.lanes.number(candidates)
        standing = None if shares.only(waiting.tenant) else shares.standing(waiting.tenant)
        return self.line.work_before(then, waiting.priority, lane, target, standing)

    def add_own_work(self, work: HeldWork, waiting: Waiting, candidates: Candidates, target: Target) -> None:
        """Add the request's work to `work`, where it would go."""
        _seconds_for(work, candidates.parts[target.part])[target.position] += self.line.work(waiting)

    def add_work_of(self, work: HeldWork, those: Iterable[Waiting], candidates: Candidates) -> None:
        """The same for each of `those` that is still held; all of them wait for `candidates`."""
        self._add_work(work, self.line.rows_with_target(those), candidates)

    def add_work_of_others(self, work: HeldWork, than: set[Waiting]) -> None:
        """The same for all held requests but those in `than`."""
        for lane, rows in self.line.by_lane(than):
            self._add_work(work, rows, self.lanes.candidates(lane))

    def _add_work(self, work: HeldWork, rows: Rows, candidates: Candidates) -> None:
        for part, ranks in enumerate(candidates.parts):
            self.line.add_work(_seconds_for(work, ranks), part, rows)


def _seconds_for(work: HeldWork, ranks: Candidates) -> Seconds:
    """The entry of `work` for `ranks`, which is made if there is none."""
    seconds = work.get(ranks)
    if seconds is None:
        seconds = work[ranks] = np.zeros(len(ranks))
    return seconds
