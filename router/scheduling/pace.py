"""How fast those who wait leave, and so when whoever comes now might find room."""

from __future__ import annotations

import math
from typing import Final

_MEMORY: Final = 10.0
"""Seconds after which a departure counts 1/e: long beside a prefill, short beside how load changes."""


class Pace:
    def __init__(self) -> None:
        self._began = self._at = 0.0
        self._left = 0.0

    def begin(self, now: float) -> None:
        """Somebody waits again, for the first time in a while."""
        self._began = self._at = now
        self._left = 0.0

    def leave(self, now: float) -> None:
        self._fade(now)
        self._left += 1

    def seconds(self, count: int, now: float) -> float:
        """Until `count` have left, as fast as of late. Where nobody has left yet, one may be just about to."""
        self._fade(now)
        window = _MEMORY * -math.expm1((self._began - now) / _MEMORY)
        return count * window / max(1.0, self._left)

    def _fade(self, now: float) -> None:
        self._left *= math.exp((self._at - now) / _MEMORY)
        self._at = now
