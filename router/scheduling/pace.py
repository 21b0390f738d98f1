"""How fast held requests leave the queue, for the `Retry-After` of those that find no room."""

from __future__ import annotations

import math
from typing import Final

_MEMORY: Final = 10.0
"""Seconds after which a departure counts 1/e: long compared with a prefill, short compared with changes of load."""


class Pace:
    def __init__(self) -> None:
        self._began = 0.0
        """Since when requests have been waiting."""
        self._left = 0.0
        """Requests that have left the queue since, with exponential decay."""
        self._at = 0.0
        """When `_left` was last brought up to date."""

    def begin(self, now: float) -> None:
        """The queue was empty, and a request waits again."""
        self._began = self._at = now
        self._left = 0.0

    def leave(self, now: float) -> None:
        """A request has left the queue."""
        self._fade(now)
        self._left += 1

    def seconds(self, count: int, now: float) -> float:
        """Seconds until `count` requests have left at the recent rate. If none has left yet, one is assumed to be about
        to."""
        self._fade(now)
        window = _MEMORY * -math.expm1((self._began - now) / _MEMORY)
        return count * window / max(1.0, self._left)

    def _fade(self, now: float) -> None:
        self._left *= math.exp((self._at - now) / _MEMORY)
        self._at = now
