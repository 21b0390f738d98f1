"""The circuit breaker of one worker: after failures in short succession the worker gets no requests for a while.

Closed, it counts failures. It opens if there were enough of them within a short time, and most requests failed. Open,
the worker gets nothing for a time that doubles with each opening in a row, with jitter, so that many routers do not
return at once. Then it is half open: one request is let through as a probe, which closes the breaker or opens it again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, get_args

WINDOW: Final = 10.0
"""Seconds for which a failure or a success counts."""
LONGEST: Final = 8.0
"""Most seconds that it stays open: a worker that is back should serve again within ten."""
PATIENCE: Final = 5.0
"""Seconds after which a probe without a result makes room for another."""
FAILURES: Final = 5
"""Failures within `WINDOW` that open it, unless told otherwise: as many as Envoy's outlier detection takes."""
WAIT: Final = 2.0
"""Seconds that it stays open the first time."""
_DOUBLINGS: Final = 16
"""Most doublings: the wait is `LONGEST` by then, and a power without bound would overflow."""
_MOST_FAILURES: Final = 0.5
"""Share of what ended within the window from which the worker counts as broken: an engine that fails one request in a
thousand is no worse than the others."""

State = Literal["closed", "open", "half-open"]
STATES: tuple[State, ...] = get_args(State)


class Breaker:
    """`now` is in seconds on one steady clock; `draw` gives uniform numbers in [0, 1)."""

    __slots__ = ("_draw", "_ends", "_failures", "_probed_at", "_tries", "_until", "state")

    def __init__(self, failures: int = FAILURES, draw: Callable[[], float] = random.random) -> None:
        """Opens after so many `failures`."""
        self._failures = failures
        self._draw = draw
        self._ends: deque[tuple[float, bool]] = deque()
        """When requests ended and whether they failed; nothing is kept before the first failure."""
        self._tries = 0
        """How often it has opened since it was last closed."""
        self._until = 0.0
        """Until when it stays open."""
        self._probed_at: float | None = None
        """While half open, when the probe was sent; None: it may still be sent."""
        self.state: State = "closed"

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {sum(failed for _, failed in self._ends)} failures>"

    @property
    def admits(self) -> bool:
        """Whether requests may go there now."""
        return self.state == "closed" or (self.state == "half-open" and self._probed_at is None)

    @property
    def quiet(self) -> bool:
        """Whether nothing has failed recently, so that a success tells nothing."""
        return not self._ends and self.state == "closed"

    def sent(self, now: float) -> bool:
        """A request is sent there. Returns whether that changes `admits`, as it does for the probe."""
        if self.state != "half-open" or self._probed_at is not None:
            return False
        self._probed_at = now
        return True

    def succeeded(self, now: float) -> bool:
        """Returns whether that changes the state. While it is open, answers to earlier requests do not close it."""
        if self.state == "half-open":
            self.reset()
            return True
        if self._ends:
            self._note(now, failed=False)
        return False

    def failed(self, now: float) -> bool:
        """Returns whether that changes the state."""
        if self.state == "open":
            return False
        self._note(now, failed=True)
        failures = sum(failed for _, failed in self._ends)
        if self.state == "closed" and (failures < self._failures or failures < _MOST_FAILURES * len(self._ends)):
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Open it, whatever was counted."""
        wait = min(LONGEST, WAIT * 2 ** min(self._tries, _DOUBLINGS))
        self._until = now + wait * (0.5 + self._draw() / 2)
        self._tries += 1
        self.state = "open"

    def tick(self, now: float) -> bool:
        """To be called every second. Returns whether that changes `admits`."""
        if self.state == "open" and now >= self._until:
            self.state = "half-open"
            self._probed_at = None
            return True
        if self.state == "half-open" and self._probed_at is not None and now - self._probed_at >= PATIENCE:
            self._probed_at = None
            return True
        return False

    def reset(self) -> None:
        """Close it; earlier failures do not count any more."""
        self._ends.clear()
        self._tries = 0
        self.state = "closed"

    def _note(self, now: float, *, failed: bool) -> None:
        self._ends.append((now, failed))
        while now - self._ends[0][0] > WINDOW:
            self._ends.popleft()
        while self._ends and not self._ends[0][1]:
            self._ends.popleft()
