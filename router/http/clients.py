"""What the connections of all clients have in common: how many there may be, what they may hold together, and how long
each may take over what it has begun.

Time is kept by a look at every connection once a second: a request costs no timer, and no reading of a clock. A look
sees what a connection is doing and how far it is; what is the same as at the last look has lasted since then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

LARGE: Final = 64 * 1024
"""Bytes of a body from which on it is counted: what is smaller is bounded by the number of connections."""
READ_AHEAD: Final = 64 * 1024
"""Bytes of requests that wait for the one before them on their connection; beyond that reading pauses."""
SPARE: Final = 256
"""Connections beyond the limit that are told so; what comes on top of them is just closed."""
_PIECE: Final = 256
"""Connections looked at in one go: the loop must not be away for longer than a fraction of a millisecond."""

Cause = Literal["max_connections", "max_buffered", "slow_request", "slow_answer"]


class Limits(NamedTuple):
    """In bytes and seconds."""

    max_body: int
    max_buffered: int = 1024**3
    """Of all bodies above `LARGE` together, from their first bytes to their answers' last."""
    max_connections: int = 16384
    client_timeout: float = 60.0
    """To send a request that is begun, and between two pieces of an answer that are taken."""
    keep_alive_timeout: float = 75.0
    """Without a request."""


class Looked(Protocol):
    def look(self, now: float) -> None: ...


Connection = TypeVar("Connection", bound=Looked)


class Clients(Generic[Connection]):
    """The connections that are open, and what is counted of them."""

    def __init__(self, limits: Limits, refused: Counter[str] | None = None) -> None:
        """`refused`: where it is to be counted why clients were turned away or cut off."""
        self.limits = limits
        self.open: set[Connection] = set()
        self.buffered = 0
        """Bytes of bodies above `LARGE`."""
        self.refused: Counter[str] = Counter() if refused is None else refused

    async def look(self, now: float) -> None:
        for number, connection in enumerate(list(self.open), 1):
            if connection in self.open:
                connection.look(now)
            if number % _PIECE == 0:
                await asyncio.sleep(0)


Doing = tuple[Literal["taking", "sending", "idle", "busy"], int]
"""What a client does, and how far it is: bytes that it has not taken yet, or requests that it has sent."""


class Stay:
    """How long a connection does the same, and comes no further."""

    __slots__ = ("_doing", "_since")

    def __init__(self) -> None:
        self._doing: Doing = "busy", -1
        self._since = 0.0

    def seconds(self, doing: Doing, now: float) -> float:
        """Until the look at `now`; bytes not taken that have become more are the same."""
        before = self._doing
        if doing != before and not (doing[0] == before[0] == "taking" and doing[1] > before[1]):
            self._doing, self._since = doing, now
        return now - self._since
