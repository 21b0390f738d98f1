"""How a worker fails a request, and what follows from it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["unreachable", "unasked", "busy", "error", "broken", "stalled"]
"""It could not be connected to; the router has no means to connect to anybody, or there is nobody; it has no room just
now; it answered that something is wrong with it; the connection broke; nothing came in time."""

BUSY_STATUSES = frozenset((429, 503))
ERROR_STATUSES = frozenset((500, 502))
RETRY_STATUSES = BUSY_STATUSES | ERROR_STATUSES


class Failure(NamedTuple):
    kind: Kind
    reason: str
    """Completes "Worker X …"."""
    sent: bool = False
    """It had been sent the request before, over a connection that broke."""

    @property
    def harmless(self) -> bool:
        """The worker has not begun to work on the request, so that it cannot be what harmed the worker."""
        return not self.sent and self.kind in {"unreachable", "unasked", "busy"}

    @property
    def untold(self) -> bool:
        """The worker is away, and knows nothing of the request."""
        return self.kind == "unreachable" and not self.sent

    @property
    def status(self) -> int:
        """Of the answer, where there is nobody else to ask."""
        return {"stalled": 504, "unasked": 503}.get(self.kind, 502)


def answered(status: int) -> Failure:
    """With an error of its own."""
    return Failure("busy" if status in BUSY_STATUSES else "error", f"answered {status}")
