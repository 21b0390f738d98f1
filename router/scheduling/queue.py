"""The queue: requests are held until the best worker for them is ready, until a worker has room, or until an objective
can be met.

A held request can still go to any worker, and can be overtaken. Each *pass* takes held requests in the order of `line`,
chooses anew among all ranks for each, counting the work of those before it, and sends those whose rank is ready. It
considers the first few, wherever they would go, and then the first for each rank: were it only the first few, they
could all wait for one busy rank while others fall idle.

Where held requests have too many different sets of candidates for one pass, passes that follow at once look into all of
them in turn: a *round*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.scheduling.admission import Admission, QueueTimeout, Refusal, Verdict
from router.scheduling.candidates import Candidates
from router.scheduling.decision import NOTHING_HELD, Decision, HeldWork, QueueState
from router.scheduling.held import HeldRequests
from router.scheduling.latency import Prefill
from router.scheduling.limits import Limits
from router.scheduling.line import Target
from router.scheduling.pass_budget import MOST, PassBudget
from router.scheduling.room import Room, Roomy
from router.scheduling.scheduler import Scheduler
from router.scheduling.waiting import Waiting

TICK: Final = 0.05
"""Seconds between two passes when nothing else happens: backlogs shrink with time."""


class Queue:
    """`now` is in seconds on the queue's clock. `ahead` is the work of held requests that go before the one
    considered."""

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
        self._held = HeldRequests(self.limits)
        self._line, self._lanes = self._held.line, self._held.lanes
        self._seen: set[Candidates] = set()
        """Sets of candidates that the passes of the present round have looked into."""
        self._cut_short = False
        """A pass of the round has sent requests, and had to leave out others for which there may be room."""
        self._changed = False
        """Something has changed since the round began."""
        self._due = False
        """A pass will be made as soon as the event loop comes to it."""
        self._ticking = False
        """A pass will be made after `TICK`."""
        scheduler.changed = self.wake

    def __len__(self) -> int:
        return len(self._line)

    def submit(self, waiting: Waiting) -> None:
        """Send or refuse the request, now or later."""
        now = self._clock()
        if self.limits.concurrency:
            candidates = waiting.candidates()
            if candidates not in self._lanes and self._held.follow():
                self.wake()  # the fleet has changed: there may be room for those that wait
            if candidates and candidates in self._lanes and self._pass_is_due(candidates, now):
                self._hold(waiting, candidates, now)  # it must not take the room of those that wait
                return
        self._consider(waiting, now, self._held.work)

    def _pass_is_due(self, candidates: Candidates, now: float) -> bool:
        """Other processes do not tell this one when they leave room, so it looks for that itself."""
        if self._scheduler.book.shared and self._lanes.was_shut(candidates) and self.room.find(candidates, now):
            self.wake()
        return self._due

    def withdraw(self, waiting: Waiting) -> None:
        """The request is no longer to be routed."""
        if waiting in self._line:
            self._held.remove(waiting, self._clock())
            self.wake()

    def wake(self) -> None:
        """Something has changed: a pass is due."""
        self._changed = True
        self._call_for_pass()

    def _call_for_pass(self) -> None:
        if len(self._line) and not self._due:
            self._due = True
            self._call_later(0, self._dispatch_due)

    def _dispatch_due(self) -> None:
        self._due = False
        self.dispatch()

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

    # -- a pass

    def dispatch(self) -> None:
        """One pass."""
        now = self._clock()
        self._time_out(now)
        ahead: HeldWork = {}
        budget = self._consider_first(now, ahead)
        if len(self._line) > MOST or self.limits.concurrency:  # otherwise the pass has considered all
            self._refuse_missed(budget, now)
            if self._seen:  # the last pass of the round counts what is held
                return
            self._held.add_work_of_others(ahead, budget.counted)
        self._held.work = ahead if len(self._line) else {}

    def _time_out(self, now: float) -> None:
        limit = self.limits.queue_timeout
        if limit is None:
            return
        for waiting in self._line.waited_over(limit, now):
            if waiting in self._line:  # refusing one may have withdrawn others
                waited = self._line.waited(waiting, now)
                self._held.remove(waiting, now)
                waiting.refuse(QueueTimeout(waited, limit, self._held.retry_after(now)))

    def _consider_first(self, now: float, ahead: HeldWork) -> PassBudget:
        """Consider the first requests, and the first for each rank; returns which those were."""
        limited, before, shares = self.limits.concurrency, len(self._line), self._held.shares
        if not self._seen:
            self._changed = False
        self._held.follow()
        budget = PassBudget(self._lanes.open(self.room if limited else None, now), self._seen)
        served = shares.served if shares.contested else None
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
        self._cut_short |= limited and budget.cut_short and len(self._line) < before
        over = budget.round_is_over or not len(self._line)
        if not over or self._cut_short or self._changed:
            self._call_for_pass()
        if over:
            self._seen.clear()
            self._cut_short = False
        return budget

    def _count_passed(self, budget: PassBudget, lane: int, ahead: HeldWork) -> None:
        """The requests of the lane that were passed over so far are ahead of those to come."""
        candidates, those = budget.lanes[lane], budget.passed_over.pop(lane, None)
        if not those or candidates not in self._lanes or self._lanes.number(candidates) != lane:
            return  # the candidates have changed since: nobody reads what is ahead for the old ones
        self._held.add_work_of(ahead, those, candidates)
        budget.counted.update(those)

    def _refuse_missed(self, budget: PassBudget, now: float) -> None:
        """Refuse the requests that the pass did not consider and whose objective has already passed."""
        for waiting in self._line.past_limit(now):
            missed = self._admission.missed(now - waiting.arrived, waiting.ttft_slo)
            if missed and waiting in self._line and waiting not in budget.considered:
                self._held.remove(waiting, now)
                waiting.refuse(missed)

    # -- one request

    def _consider(self, waiting: Waiting, now: float, ahead: HeldWork) -> bool:
        """Send, refuse or hold a request. Returns whether there was room for it."""
        candidates, roomy = waiting.candidates(), None
        if not candidates:
            self._discard(waiting, now)
            waiting.no_candidates()
            return True
        if self.limits.concurrency:
            roomy = self.room.find(candidates, now)
            if roomy is None:
                if self._hold(waiting, candidates, now):
                    self._lanes.shut(candidates)
                return False
        decision = self._select(waiting, candidates, roomy, now, ahead)
        verdict = self._judge(waiting, candidates, decision, roomy, now)
        if verdict is Verdict.HOLD:
            target = _target(decision, roomy)
            if self._hold(waiting, candidates, now, decision, target):
                self._held.add_own_work(ahead, waiting, candidates, target)
        elif isinstance(verdict, Refusal):
            self._discard(waiting, now)
            waiting.refuse(verdict)
        else:
            self._send(waiting, decision, now)
        return True

    def _consider_again(self, waiting: Waiting, now: float, ahead: HeldWork) -> bool:
        """As `_consider`, for a held request. An error in choosing for it must not leave it waiting for ever, nor those
        behind it."""
        try:
            return self._consider(waiting, now, ahead)
        except Exception as error:  # noqa: BLE001 -- `fail` tells of it
            self._discard(waiting, now)
            waiting.fail(error)
            return True

    def _select(
        self, waiting: Waiting, candidates: Candidates, roomy: Roomy | None, now: float, ahead: HeldWork
    ) -> Decision:
        return self._scheduler.select(
            roomy.candidates if roomy else candidates,
            waiting.prompt_tokens,
            waiting.matches(),
            now,
            waiting.pinned,
            policy=waiting.policy,
            stored=waiting.stored_tokens,
            limit=self._admission.ttft_left(now - waiting.arrived, waiting.ttft_slo),
            queue=self._state(candidates, roomy, ahead),
            adapter=waiting.adapter,
        )

    def _state(self, candidates: Candidates, roomy: Roomy | None, ahead: HeldWork) -> QueueState:
        if roomy is None and not len(self._line):
            return NOTHING_HELD
        held = self._lanes.size(candidates)
        requests = held / sum(map(len, candidates.parts)) if held else 0.0
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
            target, then = _target(decision, roomy), now + predicted.prefill
            predicted = predicted._replace(held=self._held.work_before(waiting, candidates, target, then))
        verdict = self._admission.judge(predicted, now - waiting.arrived, waiting.ttft_slo)
        return Verdict.HOLD if decision.hold and verdict is Verdict.ADMIT else verdict

    def _hold(
        self,
        waiting: Waiting,
        candidates: Candidates,
        now: float,
        decision: Decision | None = None,
        target: Target | None = None,
    ) -> bool:
        """Hold the request, which `decision` would send to `target`; both None: no candidate has room. Returns False if
        it was refused because too many are held."""
        held, new = self._held, waiting not in self._line
        displaced = held.displaced_by(waiting) if new else None
        if displaced is waiting:
            waiting.refuse(held.full(now))
            return False
        if new:
            held.add(waiting, candidates, now, self._admission.limit(waiting.ttft_slo), displaced)
        else:
            held.move(waiting, candidates)
        if new or decision is not None:
            work = self._work(waiting, candidates, decision, now)
            self._line.see(waiting, work, self._charge(waiting, decision), target)
        self._keep_ticking()
        if displaced is not None:  # its client may send another at once, which may displace a further one
            displaced.refuse(held.full(now))
        return waiting in self._line

    def _work(self, waiting: Waiting, candidates: Candidates, decision: Decision | None, now: float) -> float:
        """Seconds of the request's own prefill where it would go, or if that is not known, at the candidate where it
        takes least; 0 if overlaps are not known."""
        others = self._work_of_others(waiting)
        if decision is not None:
            return decision.predicted.prefill + others if decision.predicted else 0.0
        matches, tokens = waiting.matches(), waiting.prompt_tokens
        if matches is None:
            return 0.0
        return self._scheduler.least_prefill(candidates, tokens, matches, now, waiting.stored_tokens) + others

    def _work_of_others(self, waiting: Waiting) -> float:
        """Seconds of the prefills of a batch after the first; the same on every rank."""
        return self._scheduler.latency.others_share(waiting.others.tokens, waiting.prompt_tokens)

    def _charge(self, waiting: Waiting, decision: Decision | None) -> float:
        """Seconds of prefill that the tenant is charged; of the whole prompt if overlaps are not known."""
        others = self._work_of_others(waiting)
        if decision and decision.predicted:
            return decision.predicted.prefill + others
        tokens = waiting.prompt_tokens
        return self._scheduler.latency.prefill_work(Prefill(tokens, tokens)) + others

    def _send(self, waiting: Waiting, decision: Decision, now: float) -> None:
        if waiting in self._line:
            self._held.remove(waiting, now, self._charge(waiting, decision))
        elif len(self._line):
            self._held.shares.pass_by(waiting.tenant, self._charge(waiting, decision))
        waiting.send(decision, self._scheduler.reserve(decision, now, waiting.streamed, waiting.others))

    def _discard(self, waiting: Waiting, now: float) -> None:
        """Remove the request if it is in line."""
        if waiting in self._line:
            self._held.remove(waiting, now)


def _target(decision: Decision, roomy: Roomy | None) -> Target:
    """The decision's position among all candidates. `roomy`: those that it was made among; None: among all."""
    part = 0 if decision.split is None else 1
    if roomy is None:
        return Target(part, decision.position)
    return Target(part, int((roomy.prefills if part else roomy.whole)[decision.position]))
