"""Runs one rank's scheduler against a clock, real or virtual, and hands out what each step made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from engines.sim.cache import CacheEvent
from engines.sim.scheduler import Request, Scheduler, StepOutcome


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

    `publish` gets the cache's events once per step, at its end, as vLLM flushes them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: Timers,
        clock: Clock,
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._clock = clock
        self._publish = publish
        self._sinks: dict[str, Sink] = {}
        self._timer: Timer | None = None

    def submit(self, request: Request, sink: Sink) -> None:
        """ValueError when the request cannot run here."""
        now = self._clock.now()
        self.scheduler.add(request, now)
        self._sinks[request.request_id] = sink
        if self._timer is None:
            self._begin(now)

    def abort(self, request_id: str) -> None:
        """Nothing happens when the request is no longer here."""
        self._sinks.pop(request_id, None)
        self.scheduler.abort(request_id)

    def reset_cache(self, publish_now: bool) -> bool:
        """Forget all blocks; False while some are in use. The event goes out now or with the next step."""
        if not self.scheduler.cache.clear():
            return False
        if publish_now:
            self._publish(self.scheduler.cache.take_events())
        return True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._sinks.clear()

    def _begin(self, now: float) -> None:
        outcome = self.scheduler.step(now)
        end = now + outcome.duration
        self._timer = self._loop.call_at(self._clock.loop_time(end), self._end, outcome, end)

    def _end(self, outcome: StepOutcome, end: float) -> None:
        self._timer = None
        if outcome.events:
            self._publish(outcome.events)
        for request, position in outcome.emitted:
            finished = position + 1 == request.max_tokens
            sink = self._sinks.pop(request.request_id, None) if finished else self._sinks.get(request.request_id)
            if sink is not None:
                sink.on_token(position, finished)
        if self.scheduler.busy:
            self._begin(end)
