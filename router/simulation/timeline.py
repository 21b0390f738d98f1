"""Virtual time: callbacks in the order of their moments. Implements `engines.sim.rank.Timers` and its clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Handle(list[Any]):
    """One callback to come: [moment, number, callback, arguments]. A list, so that the heap compares it by itself."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class Timeline:
    """Seconds from 0. Callbacks of one moment run in the order in which they were asked for."""

    def __init__(self) -> None:
        self._now = 0.0
        self._asked = 0
        self._entries: list[Handle] = []

    def now(self) -> float:
        return self._now

    def loop_time(self, moment: float) -> float:
        """This clock is the loop's own."""
        return moment

    def call_at(self, moment: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        """A moment that has passed means now."""
        self._asked += 1
        handle = Handle((max(self._now, moment), self._asked, callback, arguments))
        heapq.heappush(self._entries, handle)
        return handle

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Handle:
        return self.call_at(self._now + seconds, callback, *arguments)

    def run(self, until: float) -> bool:
        """Everything up to `until`, at most; whether anything is left to do after it."""
        entries = self._entries
        while entries and entries[0][0] <= until:
            self._now, _, callback, arguments = heapq.heappop(entries)
            if callback is not None:
                callback(*arguments)
        return bool(entries)
