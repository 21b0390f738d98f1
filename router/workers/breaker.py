"""Circuit breaker of one worker: requests that it fails keep others away from it, until a single one shows that it is
well again.

Closed, it counts failures. It opens when enough of them came within a short time, and most of what ended there failed.
Open, the worker gets nothing for a while that doubles with each time in a row, and is spread so that many routers do
not come back at once. Then it is half open: one request may probe it, and its end closes the breaker or opens it again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, get_args

WINDOW: Final = 10.0
"""Seconds for which a failure or a success counts."""
LONGEST: Final = 8.0
"""Seconds that it stays open at most: a worker that is back should serve again within ten."""
PATIENCE: Final = 5.0
"""Seconds after which a probe that nothing was heard of makes room for another."""
FAILURES: Final = 5
WAIT: Final = 2.0
"""Seconds that it stays open the first time."""
_DOUBLINGS: Final = 16
"""After which the wait is `LONGEST` in any case: a power without end is beyond any float."""
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
        self._until = 0.0
        self._probed_at: float | None = None
        self.state: State = "closed"

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {sum(failed for _, failed in self._ends)} failures>"

    @property
    def admits(self) -> bool:
        """Whether requests may go there now."""
        return self.state == "closed" or (self.state == "half-open" and self._probed_at is None)

    @property
    def quiet(self) -> bool:
        """Nothing has failed of late, so that a success tells nothing."""
        return not self._ends and self.state == "closed"

    def sent(self, now: float) -> bool:
        """A request goes there; whether that changes `admits`: it is the probe."""
        if self.state != "half-open" or self._probed_at is not None:
            return False
        self._probed_at = now
        return True

    def succeeded(self, now: float) -> bool:
        """Whether that changes the state. An answer of a request sent before it opened is none to go by."""
        if self.state == "half-open":
            self._close()
            return True
        if self._ends:
            self._note(now, failed=False)
        return False

    def failed(self, now: float) -> bool:
        """Whether that changes the state."""
        if self.state == "open":
            return False
        self._note(now, failed=True)
        failures = sum(failed for _, failed in self._ends)
        if self.state == "closed" and (failures < self._failures or failures < _MOST_FAILURES * len(self._ends)):
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """It is known to be sick."""
        wait = min(LONGEST, WAIT * 2 ** min(self._tries, _DOUBLINGS))
        self._until = now + wait * (0.5 + self._draw() / 2)
        self._tries += 1
        self._probed_at = None
        self.state = "open"

    def tick(self, now: float) -> bool:
        """Time has passed; whether that changes `admits`."""
        if self.state == "open" and now >= self._until:
            self.state = "half-open"
            self._probed_at = None
            return True
        if self.state == "half-open" and self._probed_at is not None and now - self._probed_at >= PATIENCE:
            self._probed_at = None
            return True
        return False

    def reset(self) -> None:
        """It has started anew: what was before says nothing."""
        self._close()

    def _note(self, now: float, *, failed: bool) -> None:
        self._ends.append((now, failed))
        while now - self._ends[0][0] > WINDOW:
            self._ends.popleft()
        while self._ends and not self._ends[0][1]:
            self._ends.popleft()

    def _close(self) -> None:
        self._ends.clear()
        self._tries = 0
        self._probed_at = None
        self.state = "closed"
