"""What happened: faults, requests, violations, and the last things before them."""

from __future__ import annotations

import time
from collections import Counter, deque

from tests.chaos.answers import Fate

LAST = 60
"""Lines of the log that a report keeps."""


class Ledger:
    """Of one scenario."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: Counter[str] = Counter()
        self.fates: Counter[Fate] = Counter()
        self.left = 0
        """Requests whose client left on purpose."""
        self.cut = 0
        """Requests that ended with the router, killed or told to end by the test; asked again."""
        self.asked_again = 0
        """Of those, how many were answered then."""
        self.lost = 0
        self.violations: list[str] = []
        self.unserved = 0
        """Refused with a 5xx while a worker was well."""
        self.refusals: Counter[bytes] = Counter()
        """Of those, what was said."""
        self.returns: list[float] = []
        """Seconds from a worker's return to its first answer."""
        self.notes: dict[str, str] = {}
        self._log: deque[str] = deque(maxlen=LAST)
        self._began = time.monotonic()

    @property
    def carried(self) -> int:
        """Requests that the router took."""
        return sum(self.fates.values()) + self.left + self.cut + self.lost

    def fault(self, kind: str, where: str, count: int = 1) -> None:
        self.faults[kind] += count
        self.note(f"{kind} {where}")

    def note(self, what: str) -> None:
        self._log.append(f"{time.monotonic() - self._began:9.3f} s  {what}")

    def violate(self, what: str) -> None:
        self.note(f"VIOLATION: {what}")
        self.violations.append("\n".join([what, *self._log]) if len(self.violations) < 3 else what)
