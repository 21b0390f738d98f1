"""Runs one rank's scheduler against a clock, real or virtual, and hands out what each step made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from engines.sim.cache import CacheEvent
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler, StepOutcome


class Sink(Protocol):
    """Where one request's tokens go."""

    def on_token(self, position: int, finished: bool) -> None:
        """The answer's token at `position` (from 0) is there; `finished` with the last."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """An event loop, as far as a rank needs one."""

    def call_at(self, when: float, callback: Callable[..., object], /, *arguments: Any) -> Timer: ...


class Clock(Protocol):
    def now(self) -> float: ...
    def loop_time(self, moment: float) -> float:
        """The loop's time at a simulated `moment`."""
        ...


class Rank:
    """Steps follow each other without gaps in simulated time: a late timer delays what is seen, never the timeline.

    `publish` gets the cache's events once per step, at its end, as vLLM flushes them. `fetch` is told there, of every
    remote request that the step admitted, how many prompt tokens to fetch; `loaded` or `abort` must follow unless it is
    none, for then the request runs already.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: Timers,
        clock: Clock,
        publish: Callable[[list[CacheEvent]], None],
        fetch: Callable[[Request, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._clock = clock
        self._publish = publish
        self._fetch = fetch
        self._sinks: dict[str, Sink] = {}
        self._timer: Timer | None = None
        self._step_ends = math.inf
        """When the step under way ends, in simulated time."""

    def submit(self, request: Request, sink: Sink) -> None:
        """ValueError when the request cannot run here."""
        now = self._clock.now()
        # Of a step that is overdue the next one begins in the past; whoever is in that one came before it.
        self.scheduler.add(request, min(now, self._step_ends))
        self._sinks[request.request_id] = sink
        self._resume(now)

    def abort(self, request_id: str) -> None:
        """Nothing happens when the request is no longer here."""
        unheard = self._sinks.pop(request_id, None) is not None
        if not self.scheduler.abort(request_id) and unheard:
            self.scheduler.let_go(request_id)  # finished in the step under way, and nobody will know
        self._resume(self._clock.now())

    def loaded(self, request_id: str, tokens: int | None = None) -> None:
        """The KV of the request's first `tokens` prompt tokens (None: of all) is there."""
        self.scheduler.loaded(request_id, tokens)
        self._resume(self._clock.now())

    def let_go(self, request_id: str) -> None:
        """Free what the finished request kept; nothing happens when it keeps nothing."""
        self.scheduler.let_go(request_id)
        self._resume(self._clock.now())

    def reset_cache(self, publish_now: bool) -> bool:
        """Forget all blocks; False while some are in use. The event goes out now or with the next step."""
        # What ends in the step under way has let go of its blocks, but has them in the engine's eyes; and the step's
        # events, which are still to come, would tell of blocks that are no more.
        if self._timer is not None or not self.scheduler.cache.clear():
            return False
        if publish_now:
            self._publish(self.scheduler.cache.take_events())
        return True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._sinks.clear()

    def _resume(self, now: float) -> None:
        """Unless a step is under way, or there is nothing to do."""
        if self._timer is None and self.scheduler.busy:
            self._begin(now)

    def _begin(self, now: float) -> None:
        outcome = self.scheduler.step(now)
        end = self._step_ends = now + outcome.duration
        self._timer = self._loop.call_at(self._clock.loop_time(end), self._end, outcome, end)

    def _end(self, outcome: StepOutcome, end: float) -> None:
        # The timer stays until the end: what is told here may come back with more work, which must not begin a step.
        if outcome.events:
            self._publish(outcome.events)
        for request, position in outcome.emitted:
            finished = position + 1 == request.max_tokens
            sink = self._sinks.pop(request.request_id, None) if finished else self._sinks.get(request.request_id)
            if sink is not None:
                sink.on_token(position, finished)
        self._tell_loading(outcome.loading)
        self._timer, self._step_ends = None, math.inf
        self._resume(end)

    def _tell_loading(self, loading: list[tuple[Request, int]]) -> None:
        """But not of those that were dropped since."""
        for request, tokens in loading:
            if self._fetch and (not tokens or self.scheduler.loading.get(request.request_id) is request):
                self._fetch(request, tokens)
