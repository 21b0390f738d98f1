"""The queue: requests are held until the best worker for them is ready, until a worker has room, or until an objective
can be met.

A held request can still go to any worker, and can be overtaken. Each pass takes the held requests in the order of
`line`, chooses anew among all ranks, counting the work of those before, and sends those whose rank is ready. It
considers the first few, wherever they would go, and then the first for each rank: were it only the first few, they
could all wait for one busy rank while others fall idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from router.scheduling.admission import Admission, QueueFull, QueueTimeout, Refusal, Verdict
from router.scheduling.decision import NOTHING_HELD, Candidates, Decision, QueueState, Seconds
from router.scheduling.lanes import Lanes
from router.scheduling.latency import Prefill
from router.scheduling.limits import Limits
from router.scheduling.line import Entry, Line, Place
from router.scheduling.pace import Pace
from router.scheduling.pass_budget import MOST, PassBudget
from router.scheduling.room import Room, Roomy
from router.scheduling.scheduler import Scheduler
from router.scheduling.shares import Shares
from router.scheduling.waiting import Waiting

TICK: Final = 0.05
"""Seconds between two passes when nothing else happens: backlogs shrink with time."""


class Queue:
    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
        limits: Limits | None = None,
    ) -> None:
        """`call_later`: as of an event loop; passes are made from there only. When `limits` have changed, call
        `wake`."""
        self._scheduler = scheduler
        self._admission = admission
        self._clock = clock
        self._call_later = call_later
        self.limits = limits or Limits()
        self.room = Room(self.limits, scheduler.book)
        self._line: Line[Waiting] = Line()
        self._lanes: Lanes[Waiting] = Lanes()
        self._shares = Shares()
        self._pace = Pace()
        self._ahead: dict[Candidates, Seconds] = {}
        """Seconds of work of the held requests, by the rank that each would take."""
        self._due = False
        """A pass will be made as soon as the event loop comes to it."""
        self._ticking = False
        scheduler.changed = self.wake

    def __len__(self) -> int:
        return len(self._line)

    def submit(self, waiting: Waiting) -> None:
        """Send or refuse the request, now or later."""
        now = self._clock()
        if self.limits.concurrency:
            candidates = waiting.candidates()
            if candidates in self._lanes and self._pass_is_due(candidates, now):
                self._keep(waiting, candidates, now)  # it must not take the room of those that wait
                return
        self._consider(waiting, now, self._ahead)

    def _pass_is_due(self, candidates: Candidates, now: float) -> bool:
        """Other processes do not tell this one when they leave room, so it looks for that itself."""
        if self._scheduler.book.shared and self._lanes.was_shut(candidates) and self.room.find(candidates, now):
            self.wake()
        return self._due

    def withdraw(self, waiting: Waiting) -> None:
        """The request is no longer to be routed."""
        if waiting in self._line:
            self._remove(waiting, self._clock())
            self.wake()

    def wake(self) -> None:
        """Something has changed: a pass is due."""
        if len(self._line) and not self._due:
            self._due = True
            self._call_later(0, self._dispatch_due)

    def _dispatch_due(self) -> None:
        self._due = False
        self.dispatch()

    # -- a pass

    def dispatch(self) -> None:
        """One pass."""
        now = self._clock()
        self._time_out(now)
        ahead: dict[Candidates, Seconds] = {}
        budget = self._consider_first(now, ahead)
        if len(self._line) > MOST or self.limits.concurrency:
            self._pass_over(budget, now, ahead)
        self._ahead = ahead if len(self._line) else {}

    def _time_out(self, now: float) -> None:
        limit = self.limits.queue_timeout
        if limit is None:
            return
        for waiting in self._line.waited_over(limit, now):
            if waiting in self._line:  # whose answer is taken may withdraw another
                waited = self._line.waited(waiting, now)
                self._remove(waiting, now)
                waiting.refuse(QueueTimeout(waited, limit, self._retry_after(now)))

    def _consider_first(self, now: float, ahead: dict[Candidates, Seconds]) -> PassBudget:
        """Consider the first requests, and the first for each rank; returns which those were."""
        limited, before = self.limits.concurrency, len(self._line)
        budget = PassBudget(self._lanes.open(self.room if limited else None, now))
        served = self._shares.served if self._shares.contested else None
        for waiting, spot in self._line.order(now, budget.lanes, served):
            if budget.exhausted:
                break
            if waiting not in self._line:  # a request that was sent may have failed at once, and withdrawn this one
                continue
            if not budget.may_consider(spot):
                budget.pass_over(waiting, spot[0])
                continue
            self._count_passed(budget, spot[0], ahead)
            had_room = self._consider_again(waiting, now, ahead)
            budget.spend(waiting, spot, self._line.spot(waiting) if waiting in self._line else None, had_room)
        if limited and budget.cut_short and len(self._line) < before:
            self.wake()
        return budget

    def _count_passed(self, budget: PassBudget, lane: int, ahead: dict[Candidates, Seconds]) -> None:
        """The requests of the lane that were passed over so far are ahead of those to come."""
        candidates, those = budget.lanes[lane], budget.passed_over.pop(lane, None)
        if not those or candidates not in self._lanes or self._lanes.number(candidates) != lane:
            return  # where the candidates have changed, nobody looks at what is ahead for the old ones
        for part, ranks in enumerate(_parts(candidates)):
            self._line.add_work_of(those, _works(ahead, ranks), part)
        budget.counted.update(those)

    def _pass_over(self, budget: PassBudget, now: float, ahead: dict[Candidates, Seconds]) -> None:
        """Account for the requests that the pass did not consider; those whose objective has already passed are
        refused."""
        line = self._line
        for waiting in line.past_limit(now):
            missed = self._admission.missed(now - waiting.arrived, waiting.ttft_slo)
            if missed and waiting in line and waiting not in budget.considered:
                self._remove(waiting, now)
                waiting.refuse(missed)
        for lane, candidates in self._lanes.each():
            for part, ranks in enumerate(_parts(candidates)):
                line.add_work(_works(ahead, ranks), lane, part, budget.counted)

    # -- one request

    def _consider(self, waiting: Waiting, now: float, ahead: dict[Candidates, Seconds]) -> bool:
        """Send, refuse or keep a request. Returns whether there was room for it."""
        candidates, roomy = waiting.candidates(), None
        if not candidates:
            self._discard(waiting, now)
            waiting.no_candidates()
            return True
        if self.limits.concurrency:
            roomy = self.room.find(candidates, now)
            if roomy is None:
                if self._keep(waiting, candidates, now):
                    self._lanes.shut(candidates)
                return False
        decision = self._select(waiting, candidates, roomy, now, ahead)
        verdict = self._judge(waiting, candidates, decision, roomy, now)
        if verdict is Verdict.HOLD:
            place = _place(decision, roomy)
            if self._keep(waiting, candidates, now, decision, place):
                _works(ahead, _parts(candidates)[place.part])[place.position] += self._line.work(waiting)
        elif isinstance(verdict, Refusal):
            self._discard(waiting, now)
            waiting.refuse(verdict)
        else:
            self._send(waiting, decision, now)
        return True

    def _consider_again(self, waiting: Waiting, now: float, ahead: dict[Candidates, Seconds]) -> bool:
        """A fault in choosing for one must leave nobody waiting: neither itself nor those behind it."""
        try:
            return self._consider(waiting, now, ahead)
        except Exception as error:  # noqa: BLE001 -- `fail` tells of it
            self._discard(waiting, now)
            waiting.fail(error)
            return True

    def _select(
        self,
        waiting: Waiting,
        candidates: Candidates,
        roomy: Roomy | None,
        now: float,
        ahead: dict[Candidates, Seconds],
    ) -> Decision:
        return self._scheduler.select(
            roomy.candidates if roomy else candidates,
            waiting.prompt_tokens,
            waiting.matches(),
            now,
            waiting.pinned,
            policy=waiting.policy,
            stored=waiting.stored_tokens,
            limit=self._admission.most(now - waiting.arrived, waiting.ttft_slo),
            queue=self._state(candidates, roomy, ahead),
        )

    def _state(self, candidates: Candidates, roomy: Roomy | None, ahead: dict[Candidates, Seconds]) -> QueueState:
        if roomy is None and not len(self._line):
            return NOTHING_HELD
        held = self._lanes.size(candidates)
        requests = held / sum(map(len, _parts(candidates))) if held else 0.0
        if roomy is None:
            return QueueState(ahead, requests)
        return QueueState(roomy.of(candidates, ahead), requests, leaves_out=roomy.candidates is not candidates)

    def _judge(
        self, waiting: Waiting, candidates: Candidates, decision: Decision, roomy: Roomy | None, now: float
    ) -> Verdict | Refusal:
        if waiting.pinned:
            return Verdict.ADMIT
        predicted = decision.predicted if self._admission.concerns(waiting.ttft_slo) else None
        if predicted is None:
            return Verdict.HOLD if decision.hold else Verdict.ADMIT
        if waiting not in self._line:  # it is last in line, but may overtake
            place, then = _place(decision, roomy), now + predicted.prefill
            predicted = predicted._replace(held=self._before(waiting, candidates, place, then))
        verdict = self._admission.judge(predicted, now - waiting.arrived, waiting.ttft_slo)
        return Verdict.HOLD if decision.hold and verdict is Verdict.ADMIT else verdict

    def _before(self, waiting: Waiting, candidates: Candidates, place: Place, then: float) -> float:
        """Seconds of held work for the same rank that will go before a new request."""
        if candidates not in self._lanes:
            return 0.0
        standing = None if self._shares.only(waiting.tenant) else self._shares.standing(waiting.tenant)
        return self._line.work_before(then, waiting.priority, self._lanes.number(candidates), place, standing)

    def _send(self, waiting: Waiting, decision: Decision, now: float) -> None:
        if waiting in self._line:
            self._remove(waiting, now, self._charge(waiting, decision))
        elif len(self._line):
            self._shares.pass_by(waiting.tenant, self._charge(waiting, decision))
        waiting.send(decision, self._scheduler.reserve(decision, now, waiting.streamed))

    def _charge(self, waiting: Waiting, decision: Decision | None) -> float:
        """Seconds of prefill that the tenant is charged; of the whole prompt if overlaps are not known."""
        if decision and decision.predicted:
            return decision.predicted.prefill
        tokens = waiting.prompt_tokens
        return self._scheduler.latency.prefill_work(Prefill(tokens, tokens))

    # -- in and out

    def _keep(
        self,
        waiting: Waiting,
        candidates: Candidates,
        now: float,
        decision: Decision | None = None,
        place: Place | None = None,
    ) -> bool:
        """Hold the request. `decision` None: no candidate has room. Returns False if it was refused because too many
        are held."""
        displaced = None
        if waiting in self._line:
            self._move(waiting, candidates)
        else:
            displaced = self._displaced_by(waiting)
            if displaced is waiting:
                waiting.refuse(self._full(now))
                return False
            self._add(waiting, candidates, now, displaced)
            if decision is None:
                self._line.see(waiting, self._estimate(waiting, candidates, now), self._charge(waiting, None), None)
        if decision:
            work = decision.predicted.prefill if decision.predicted else 0.0
            self._line.see(waiting, work, self._charge(waiting, decision), place)
        self._keep_ticking()
        if displaced is not None:  # its client may send another at once, which may displace a further one
            displaced.refuse(self._full(now))
        return waiting in self._line

    def _estimate(self, waiting: Waiting, candidates: Candidates, now: float) -> float:
        matches = waiting.matches()
        if matches is None:
            return 0.0
        return self._scheduler.least_prefill(candidates, waiting.prompt_tokens, matches, now, waiting.stored_tokens)

    def _add(self, waiting: Waiting, candidates: Candidates, now: float, displaced: Waiting | None) -> None:
        """Put the request in line, in place of `displaced`."""
        if displaced is not None:
            self._remove(displaced, now, displaced=True)
        if not len(self._line):
            self._pace.begin(now)
        limit, tenant = self._admission.limit(waiting.ttft_slo), self._shares.enter(waiting.tenant)
        lane = self._lanes.enter(waiting, candidates)
        self._line.add(waiting, Entry(waiting.arrived, now, limit, waiting.priority, tenant), lane)

    def _displaced_by(self, waiting: Waiting) -> Waiting | None:
        """Which request has to leave for `waiting`: the last one of the tenant with the most held requests, which may
        be `waiting` itself. None: the queue is not full."""
        limit = self.limits.max_queue
        if limit is None or len(self._line) < limit:
            return None
        own = self._shares.waiting(waiting.tenant)
        most, fattest = self._shares.most() if len(self._line) else (0, 0)
        if most > own + 1:
            return self._line.last(fattest)[1]
        if not own:
            return waiting
        priority, last = self._line.last(self._shares.number(waiting.tenant))
        return last if priority > waiting.priority else waiting

    def _full(self, now: float) -> QueueFull:
        return QueueFull(len(self._line), self._retry_after(now))

    def _retry_after(self, now: float) -> int:
        """Seconds until all requests held now have left, or have reached the queue timeout."""
        seconds = min(self._pace.seconds(len(self._line), now), self.limits.queue_timeout or math.inf)
        return max(1, math.ceil(seconds))

    def _move(self, waiting: Waiting, candidates: Candidates) -> None:
        before = self._line.lane(waiting)
        if candidates not in self._lanes or self._lanes.number(candidates) != before:
            self._line.move(waiting, self._lanes.enter(waiting, candidates))
            self._lanes.leave(waiting, before)

    def _remove(self, waiting: Waiting, now: float, charge: float = 0.0, *, displaced: bool = False) -> None:
        tenant, lane = self._line.remove(waiting)
        self._lanes.leave(waiting, lane)
        self._shares.leave(tenant, charge)
        if not displaced:
            self._pace.leave(now)
        if not len(self._line):  # nobody waits: there is nothing ahead and nothing to share
            self._ahead = {}
            self._shares = Shares()

    def _discard(self, waiting: Waiting, now: float) -> None:
        """Remove the request if it is in line."""
        if waiting in self._line:
            self._remove(waiting, now)

    def _keep_ticking(self) -> None:
        if len(self._line) and not self._ticking:
            self._ticking = True
            self._call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if len(self._line):
            try:
                self.dispatch()
            finally:  # a fault with one request must not leave all others waiting
                self._keep_ticking()


def _place(decision: Decision, roomy: Roomy | None) -> Place:
    """The decision's position among all candidates."""
    part = 0 if decision.split is None else 1
    if roomy is None:
        return Place(part, decision.position)
    return Place(part, int((roomy.prefills if part else roomy.whole)[decision.position]))


def _parts(candidates: Candidates) -> Sequence[Candidates]:
    """The candidates that `Place.part` refers to."""
    return (candidates.whole, candidates.split.prefills) if candidates.split else (candidates.whole,)


def _works(ahead: dict[Candidates, Seconds], ranks: Candidates) -> Seconds:
    works = ahead.get(ranks)
    if works is None:
        works = ahead[ranks] = np.zeros(len(ranks))
    return works
