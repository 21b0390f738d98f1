"""A scheduler with its queue on a clock that a test moves, and requests that remember what became of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from indexer.matches import Matches
from router.scheduling.admission import Admission
from router.scheduling.booking import Booking
from router.scheduling.candidates import Candidates
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Cost, Decision, Policy, Situation
from router.scheduling.limits import Limits
from router.scheduling.load import Load, LoadBook
from router.scheduling.others import ALONE, Others
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.scheduling.waiting import AnyRefusal
from tests.router.scheduling.candidates import Scripted, holding_on_gpu, named

NOTHING_HELD = holding_on_gpu({})


class Clock:
    """`call_later` and the time, as an event loop has them; it stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), callback))

    @property
    def timers(self) -> list[float]:
        """Seconds until each."""
        return sorted(round(at - self.now, 6) for at, _, _ in self._timers)

    def run(self, seconds: float = 0.0) -> None:
        """All that is due until then."""
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            at, _, callback = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            callback()
        self.now = until


class Gate:
    """A cost policy: the rank with the fewest requests, of which each takes `limit` at a time."""

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self.held: list[list[float]] = []
        """What each look was shown of the work ahead."""
        self.held_requests: list[float] = []
        """And how many are held for each rank."""

    def cost(self, situation: Situation) -> Cost:
        self.held.append(situation.held_seconds.round(6).tolist())
        self.held_requests.append(situation.held_requests)
        values = situation.requests + situation.held_seconds
        return Cost(values.astype(np.float64), 1.0, situation.requests < self.limit)


class Loyal:
    """A cost policy: the rank that holds most of the prompt and little work is held for, which takes one request at a
    time."""

    def __init__(self) -> None:
        self.held: list[list[float]] = []
        """As `Gate.held`."""

    def cost(self, situation: Situation) -> Cost:
        self.held.append(situation.held_seconds.round(6).tolist())
        values = situation.held_seconds - 1e3 * situation.overlap_tokens
        return Cost(values.astype(np.float64), 1.0, situation.requests < 1)


class Desk:
    """Where requests are handed in."""

    def __init__(
        self,
        policy: Policy | None = None,
        ranks: Iterable[str] = "a",
        limits: Limits | None = None,
        book: LoadBook | None = None,
        **admission: Any,
    ) -> None:
        self.clock = Clock()
        self.candidates = named(ranks)
        self.scheduler = Scheduler(policy or Cheapest(Gate()), book or LoadBook(), Scripted([0.0] * 10_000))
        for each in self.candidates.ranks:
            self.scheduler.watch(each, 16)
        self.queue = Queue(self.scheduler, Admission(**admission), self.clock, self.clock.call_later, limits)
        self.sent: list[Request] = []

    def ask(self, name: str = "", prompt: int = 100, **about: Any) -> Request:
        request = Request(self, name, prompt, **about)
        self.queue.submit(request)
        return request

    @property
    def names(self) -> str:
        """Of those that were sent, in their order."""
        return "".join(request.name for request in self.sent)

    @property
    def loads(self) -> set[Load]:
        return {found.load for found in self.scheduler.book.get_metrics(self.clock.now).values()}

    @property
    def backlog(self) -> list[float]:
        ones = np.ones(len(self.candidates))
        seconds: list[float] = self.scheduler.backlog.seconds(self.candidates, ones, self.clock.now).tolist()
        return seconds

    @property
    def at_rest(self) -> bool:
        return self.loads == {Load()} and not any(self.backlog) and not len(self.queue)


class Request:
    """Implements `queue.Waiting`."""

    def __init__(
        self,
        desk: Desk,
        name: str,
        prompt: int,
        *,
        priority: int = 0,
        tenant: str = "",
        pinned: bool = False,
        ttft_slo: float | None = None,
        streamed: bool = True,
        others: Others = ALONE,
        adapter: str | None = None,
        matches: Matches | None = None,
        known: bool = True,
        candidates: Candidates | None = None,
        on_sent: Sequence[Callable[[Request], None]] = (),
        on_refused: Callable[[Request], None] | None = None,
    ) -> None:
        """`known`: its tokens are; `on_sent`: called in turn, each time that it is sent."""
        self._desk = desk
        self.name = name
        self.prompt_tokens = prompt
        self.arrived = desk.clock.now
        self.priority = priority
        self.tenant = tenant
        self.pinned = pinned
        self.ttft_slo = ttft_slo
        self.stored_tokens = 0
        self.streamed = streamed
        self.others = others
        self.adapter = adapter
        self.policy: Policy | None = None
        self._matches = matches
        self._known = known
        self.chosen_from = candidates
        self._on_sent = list(on_sent)
        self._on_refused = on_refused
        self.looks = self.outcomes = 0
        self.decision: Decision | None = None
        self.booking: Booking | None = None
        self.refusal: AnyRefusal | None = None
        self.had_no_candidates = False
        self.error: Exception | None = None

    def candidates(self) -> Candidates:
        return self._desk.candidates if self.chosen_from is None else self.chosen_from

    def matches(self) -> Matches | None:
        self.looks += 1
        if self._matches is None and self._known:
            return NOTHING_HELD
        return self._matches

    def send(self, decision: Decision, booking: Booking) -> None:
        self.outcomes += 1
        self.decision, self.booking = decision, booking
        self._desk.sent.append(self)
        if self._on_sent:
            self._on_sent.pop(0)(self)

    def refuse(self, refusal: AnyRefusal) -> None:
        self.outcomes += 1
        self.refusal = refusal
        if self._on_refused:
            self._on_refused(self)

    def no_candidates(self) -> None:
        self.outcomes += 1
        self.had_no_candidates = True

    def fail(self, error: Exception) -> None:
        self.outcomes += 1
        self.error = error

    # -- what its worker does

    def first_token(self) -> None:
        assert self.booking
        self.booking.first_token(self._desk.clock.now)

    def end(self) -> None:
        """And whoever waits is looked at."""
        assert self.booking
        self.booking.release(self._desk.clock.now)
        self._desk.clock.run()

    @property
    def fate(self) -> str:
        fates = (
            (self.booking, "sent"),
            (self.refusal, "refused"),
            (self.had_no_candidates, "no candidates"),
            (self.error, "failed"),
        )
        (fate,) = [name for happened, name in fates if happened] or ["waits"]
        return fate
