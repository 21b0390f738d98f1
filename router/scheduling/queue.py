"""Requests that wait in the router: held until the worker that is best for them is ready, or until an SLO can be kept.

While a request waits it can still go anywhere, and be overtaken. Each pass takes those that wait in order of urgency,
chooses anew for each among all ranks, with the work of those before it counted as theirs, and sends what may go.

The order is that of the highest response ratio (Brinch Hansen 1971): (waited + own work) / own work. Short work goes
first, which makes the mean small, but waiting counts for the more the shorter the work, so that nothing starves; a
smaller `priority` goes before all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import Final, Protocol

import numpy as np

from indexer.matches import Matches
from router.scheduling.admission import Admission, Refusal, Verdict
from router.scheduling.booking import Booking
from router.scheduling.decision import Candidates, Decision, Policy, Seconds
from router.scheduling.scheduler import Scheduler

LOOK: Final = 8
"""Requests that one pass looks at: a pass must not take longer than the loop may be away, about a millisecond."""
TICK: Final = 0.05
"""Seconds between two passes when nothing else happens: what a rank has before it shrinks by the passing of time."""


_LEAST_WORK: Final = 1e-3
"""Seconds."""


class Waiting(Protocol):
    """A request that may have to wait. Exactly one of the last three is called, unless it is withdrawn before."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def priority(self) -> int:
        """The smaller, the sooner; 0 is usual."""

    @property
    def ttft_slo(self) -> float | None: ...
    @property
    def stored_tokens(self) -> int:
        """Of the prompt's leading ones, those in a shared store."""

    @property
    def streamed(self) -> bool:
        """Whether its first token will be seen."""

    @property
    def policy(self) -> Policy | None:
        """None: the scheduler's own."""

    def candidates(self) -> Candidates:
        """Those of the moment; there may be none."""

    def matches(self) -> Matches | None: ...
    def send(self, decision: Decision, booking: Booking) -> None: ...
    def refuse(self, refusal: Refusal) -> None: ...
    def nobody(self) -> None:
        """There is no candidate any more."""


class _Held:
    """What the last look at a waiting request showed."""

    __slots__ = ("candidates", "position", "waiting", "work")

    def __init__(self, waiting: Waiting, decision: Decision) -> None:
        self.waiting = waiting
        self.see(decision)

    def see(self, decision: Decision) -> None:
        self.candidates = decision.candidates
        self.position = decision.position
        self.work = decision.predicted.prefill if decision.predicted else 0.0

    def urgency(self, now: float) -> tuple[int, float]:
        """The least goes first."""
        return self.waiting.priority, -(now - self.waiting.arrived) / max(_LEAST_WORK, self.work)


class Queue:
    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`call_later` as an event loop has it; a pass is never made within a call from outside."""
        self._scheduler = scheduler
        self._admission = admission
        self._clock = clock
        self._call_later = call_later
        self._held: dict[Waiting, _Held] = {}
        self._ahead: dict[Candidates, Seconds] = {}
        """Work of all that wait, by the rank that each would take."""
        self._asked = False
        self._ticking = False
        scheduler.changed = self.wake

    def __len__(self) -> int:
        return len(self._held)

    def submit(self, waiting: Waiting) -> None:
        """Send it, refuse it, or keep it until one of these can be done."""
        self._consider(waiting, self._clock(), self._ahead)

    def withdraw(self, waiting: Waiting) -> None:
        """Its client has gone, or it has found its way otherwise."""
        if self._held.pop(waiting, None):
            self._forget_ahead()
            self.wake()

    def _forget_ahead(self) -> None:
        """Where nobody waits, nobody is ahead."""
        if not self._held:
            self._ahead = {}

    def wake(self) -> None:
        """Something has changed: a pass is due."""
        if self._held and not self._asked:
            self._asked = True
            self._call_later(0, self._answer)

    def _answer(self) -> None:
        self._asked = False
        self.dispatch()

    def dispatch(self) -> None:
        """One pass."""
        now = self._clock()
        ahead: dict[Candidates, Seconds] = {}
        first = nsmallest(LOOK, self._held.values(), key=lambda held: held.urgency(now))
        for held in first:
            if held.waiting in self._held:  # what is sent may fail at once, and withdraw others
                self._consider(held.waiting, now, ahead)
        if len(self._held) > LOOK:
            self._pass_over({id(held) for held in first}, now, ahead)
        self._ahead = ahead
        self._forget_ahead()

    def _pass_over(self, looked: set[int], now: float, ahead: dict[Candidates, Seconds]) -> None:
        """Those that a pass does not look at; an objective that has passed meanwhile is no matter of prediction."""
        for held in [held for held in self._held.values() if id(held) not in looked]:
            waiting = held.waiting
            missed = self._admission.missed(now - waiting.arrived, waiting.ttft_slo)
            if missed and waiting in self._held:
                del self._held[waiting]
                waiting.refuse(missed)
            else:
                _count(ahead, held)

    def _consider(self, waiting: Waiting, now: float, ahead: dict[Candidates, Seconds]) -> None:
        candidates = waiting.candidates()
        if not candidates:
            self._held.pop(waiting, None)
            waiting.nobody()
            return
        decision = self._scheduler.select(
            candidates,
            waiting.prompt_tokens,
            waiting.matches(),
            now,
            held=ahead,
            policy=waiting.policy,
            stored=waiting.stored_tokens,
        )
        verdict = self._judge(waiting, decision, now)
        if verdict is Verdict.HOLD:
            self._hold(waiting, decision, ahead)
            return
        self._held.pop(waiting, None)
        if isinstance(verdict, Refusal):
            waiting.refuse(verdict)
        else:
            waiting.send(decision, self._scheduler.reserve(decision, now, waiting.streamed))

    def _judge(self, waiting: Waiting, decision: Decision, now: float) -> Verdict | Refusal:
        predicted = decision.predicted if self._admission.concerns(waiting.ttft_slo) else None
        if predicted is None:
            return Verdict.HOLD if decision.hold else Verdict.ADMIT
        if waiting not in self._held:  # it comes last, but will not stay there
            predicted = predicted._replace(held=self._before(waiting, decision, now))
        verdict = self._admission.judge(predicted, now - waiting.arrived, waiting.ttft_slo)
        return Verdict.HOLD if decision.hold and verdict is Verdict.ADMIT else verdict

    def _before(self, waiting: Waiting, decision: Decision, now: float) -> float:
        """Work that goes to the same rank before one who has just come: of those that will be more urgent than it when
        it has waited for as long as its own work takes, which makes its response ratio 1."""
        if not self._held or decision.predicted is None:
            return 0.0
        then, mine = now + decision.predicted.prefill, (waiting.priority, -1.0)
        return sum(
            held.work
            for held in self._held.values()
            if held.candidates is decision.candidates
            and held.position == decision.position
            and held.urgency(then) < mine
        )

    def _hold(self, waiting: Waiting, decision: Decision, ahead: dict[Candidates, Seconds]) -> None:
        held = self._held.get(waiting)
        if held is None:
            held = self._held[waiting] = _Held(waiting, decision)
        else:
            held.see(decision)
        _count(ahead, held)
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self._held and not self._ticking:
            self._ticking = True
            self._call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._held:
            self.dispatch()
            self._keep_ticking()


def _count(ahead: dict[Candidates, Seconds], held: _Held) -> None:
    works = ahead.get(held.candidates)
    if works is None:
        works = ahead[held.candidates] = np.zeros(len(held.candidates))
    works[held.position] += held.work
