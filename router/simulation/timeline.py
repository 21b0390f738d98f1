"""Virtual time: callbacks in the order of their moments. Implements `engines.sim.rank.Timers` and its clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_Entry = tuple[float, int, "Handle"]


class Handle:
    """One callback to come."""

    __slots__ = ("arguments", "callback", "cancelled")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.callback = callback
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """Seconds from 0. Callbacks of one moment run in the order in which they were asked for."""

    def __init__(self) -> None:
        self._now = 0.0
        self._asked = 0
        self._entries: list[_Entry] = []

    def now(self) -> float:
        return self._now

    def loop_time(self, moment: float) -> float:
        """This clock is the loop's own."""
        return moment

    def call_at(self, moment: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        """A moment that has passed means now."""
        handle = Handle(callback, arguments)
        self._asked += 1
        heapq.heappush(self._entries, (max(moment, self._now), self._asked, handle))
        return handle

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        return self.call_at(self._now + seconds, callback, *arguments)

    def run(self, until: float) -> bool:
        """Everything up to `until`, at most; whether anything is left to do after it."""
        entries = self._entries
        while entries and entries[0][0] <= until:
            self._now, _, handle = heapq.heappop(entries)
            if not handle.cancelled:
                handle.callback(*handle.arguments)
        return bool(entries)
