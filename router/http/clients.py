"""Limits that concern all client connections: their number, the bytes that they hold together, and time limits.

Time limits are checked at every connection once a second, so that a request needs no timer and no clock. Such a tick
sees what a client is doing and how far it got; if both are the same as at the last tick, the connection has been at it
since then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from router.http.messages import date_line

LARGE: Final = 64 * 1024
"""Bodies above this many bytes are counted; smaller ones are bounded by the number of connections."""
READ_AHEAD: Final = 64 * 1024
"""Bytes of pipelined requests that wait on a connection; beyond that, reading pauses."""
SPARE: Final = 256
"""Connections beyond the limit that still get an answer (503); further ones are just closed."""
_PIECE: Final = 256
"""Connections checked before others on the event loop get their turn, after a fraction of a millisecond."""

Cause = Literal["max_connections", "max_buffered", "slow_request", "slow_answer", "tls_handshake"]


class Limits(NamedTuple):
    """In bytes and seconds."""

    max_body: int
    max_buffered: int = 1024**3
    """All bodies above `LARGE` together, from their first byte to the last of their answers."""
    max_connections: int = 16384
    client_timeout: float = 60.0
    """For sending a request that has begun, and between two pieces of an answer that the client takes."""
    keep_alive_timeout: float = 75.0
    """For a connection without a request."""


class HasTick(Protocol):
    def tick(self, now: float) -> None: ...


Connection = TypeVar("Connection", bound=HasTick)


class Shared:
    """The limits, and what is counted over all connections."""

    def __init__(self, limits: Limits, refused: Counter[str] | None = None) -> None:
        """`refused`: counts, by cause, clients that were turned away or cut off."""
        self.limits = limits
        self.buffered = 0
        """Bytes of bodies above `LARGE`."""
        self.refused: Counter[str] = Counter() if refused is None else refused
        self.date = b""
        """The Date header line of answers that are made here (RFC 9110 section 6.6.1)."""


class Clients(Shared, Generic[Connection]):
    """The open connections."""

    def __init__(
        self, limits: Limits, refused: Counter[str] | None = None, wall_clock: Callable[[], float] | None = None
    ) -> None:
        """`wall_clock`: for the dates of answers; None: they have none."""
        super().__init__(limits, refused)
        self.open: set[Connection] = set()
        self._wall_clock = wall_clock
        self._tell_date()

    def _tell_date(self) -> None:
        if self._wall_clock:
            self.date = date_line(self._wall_clock())

    async def tick(self, now: float) -> None:
        """To be called once a second."""
        self._tell_date()
        for number, connection in enumerate(list(self.open), 1):
            if connection in self.open:
                connection.tick(now)
            if number % _PIECE == 0:
                await asyncio.sleep(0)


class Activity(NamedTuple):
    """What a client does, and how far it got."""

    what: Literal["taking", "sending", "idle", "busy"]
    progress: int
    """Bytes of an answer that it has not taken yet, or requests that it has sent."""


class ActivityTimer:
    """How long a client has been at the same activity without getting any further."""

    __slots__ = ("_activity", "_since")

    def __init__(self) -> None:
        self._activity = Activity("busy", -1)
        self._since = 0.0

    def seconds(self, activity: Activity, now: float) -> float:
        """Seconds up to `now`. More bytes that the client has not taken do not count as progress."""
        before = self._activity
        falls_behind = activity.what == before.what == "taking" and activity.progress > before.progress
        self._activity = activity  # also of one that falls behind: whatever it takes of more is progress
        if activity != before and not falls_behind:
            self._since = now
        return now - self._since
