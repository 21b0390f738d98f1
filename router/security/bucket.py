"""A token bucket. Pure: the clock is an argument."""

from __future__ import annotations


class Bucket:
    """Holds a minute's requests, and fills up evenly within a minute."""

    __slots__ = ("_filled", "_left", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        """Full. `now` in seconds, here and below, of any clock that does not go back."""
        self._per_minute = per_minute
        self._left = max(1.0, per_minute)
        self._filled = now

    def take(self, now: float) -> float:
        """Takes one, or returns the seconds until there will be one; 0 when it was taken."""
        rate = self._per_minute / 60
        self._left = min(max(1.0, self._per_minute), self._left + (now - self._filled) * rate)
        self._filled = now
        if self._left < 1:
            return (1 - self._left) / rate
        self._left -= 1
        return 0.0
