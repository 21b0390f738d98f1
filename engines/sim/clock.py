"""Simulated time: the event loop's, multiplied."""

from __future__ import annotations

import asyncio


class SimClock:
    """Seconds since the clock was made, `speedup` of them each real second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speedup: float) -> None:
        self._loop = loop
        self._start = loop.time()
        self._speedup = speedup

    def now(self) -> float:
        return (self._loop.time() - self._start) * self._speedup

    def loop_time(self, moment: float) -> float:
        """The event loop's time at a simulated `moment`."""
        return self._start + moment / self._speedup
