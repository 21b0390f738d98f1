"""The ways in which a worker can fail a request, and what follows from each."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["unreachable", "unasked", "busy", "error", "broken", "stalled"]
"""In this order: it could not be connected to; no worker could be asked, since the router cannot open a connection or
there is no worker; it answered that it is busy; it answered with an error; the connection broke; nothing came in time.
"""

BUSY_STATUSES = frozenset((429, 503))
ERROR_STATUSES = frozenset((500, 502))
RETRY_STATUSES = BUSY_STATUSES | ERROR_STATUSES

MOST_HARMED = 1
"""Workers that may fail badly on one request before no other is tried: a request that crashes engines must not crash
all."""


class Failure(NamedTuple):
    kind: Kind
    reason: str
    """A predicate for the sentence "Worker X …"."""
    sent: bool = False
    """Whether it had already been sent the request once, over a connection that broke."""

    @property
    def harmless(self) -> bool:
        """Whether the worker had not begun to work on the request, which can therefore not have crashed it."""
        return not self.sent and self.kind in {"unreachable", "unasked", "busy"}

    @property
    def untold(self) -> bool:
        """Whether the worker is unreachable and has never seen the request."""
        return self.kind == "unreachable" and not self.sent

    @property
    def status(self) -> int:
        """The status of the client's answer where no other worker can be tried."""
        return {"stalled": 504, "unasked": 503}.get(self.kind, 502)


def answered(status: int) -> Failure:
    """The worker answered with this error status."""
    return Failure("busy" if status in BUSY_STATUSES else "error", f"answered {status}")
