"""Virtual time: runs callbacks in the order of their times. Implements `engines.sim.rank.Timers` and its clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Handle(list[Any]):
    """A scheduled callback: [time, number, callback, arguments]. It is a list so that heapq can compare it fast."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class Timeline:
    """A clock that starts at 0 seconds. Callbacks due at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self._now = 0.0
        self._asked = 0
        self._entries: list[Handle] = []

    def now(self) -> float:
        return self._now

    def loop_time(self, moment: float) -> float:
        """The same time: here the clock and the event loop's time are one."""
        return moment

    def call_at(self, moment: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        """Schedules a callback; a time in the past means now."""
        self._asked += 1
        handle = Handle((max(self._now, moment), self._asked, callback, arguments))
        heapq.heappush(self._entries, handle)
        return handle

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        return self.call_at(self._now + seconds, callback, *arguments)

    def run(self, until: float) -> None:
        """Runs the callbacks that are due by `until`."""
        entries = self._entries
        while entries and entries[0][0] <= until:
            self._now, _, callback, arguments = heapq.heappop(entries)
            if callback is not None:
                callback(*arguments)
