"""Connections to one worker, kept and reused."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable, Collection
from typing import NamedTuple
from urllib.parse import urlsplit

from router.http.messages import RESPONSE_HEADERS
from router.http.protocol import for_loop
from router.http.upstream import KnownHeads, WorkerConnection

IDLE_LIFE = 4.0
"""Seconds for which an idle connection is kept. Engines serve with uvicorn, which closes after 5 s
(`timeout_keep_alive`). A shorter life here makes it unlikely that a request is sent into a connection that is being
closed."""


_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Errors in connecting that are not the other side's fault."""


class NoConnection(NamedTuple):
    reason: str
    ours: bool = False
    """This process lacks something: file descriptors, memory, ports."""


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    authority: bytes
    """For the Host header."""
    base: bytes
    """Path prefix of every target, without a trailing slash."""


def parse_address(url: str) -> Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Address(
        parts.hostname or "",
        parts.port or (443 if tls else 80),
        tls,
        parts.netloc.rpartition("@")[2].encode(),
        parts.path.rstrip("/").encode(),
    )


class Pool:
    """One connection per running request; idle ones are kept for `IDLE_LIFE`."""

    def __init__(
        self,
        url: str,
        connect_timeout: float,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        passing: Collection[bytes] = RESPONSE_HEADERS,
    ) -> None:
        """`passing`: names of response headers that pass to clients."""
        self.address = parse_address(url)
        self._tls = (tls or ssl.create_default_context()) if self.address.tls else None
        self._connect_timeout = connect_timeout
        self._clock = clock
        self.ended = 0
        """Complete answers so far."""
        self._idle: dict[WorkerConnection, float] = {}
        """Since when each is idle, the longest first."""
        self._open: set[WorkerConnection] = set()
        self._connecting: dict[asyncio.Task[None], Callable[[NoConnection], None]] = {}
        """Attempts to connect, each with the callback for its failure."""
        self._cut: str | None = None
        self._heads = KnownHeads(passing)

    def __repr__(self) -> str:
        return f"<Pool {self.address.authority.decode()}: {len(self._open)} open, {len(self._idle)} idle>"

    @property
    def busy(self) -> int:
        """Connections with an answer under way."""
        return len(self._open) - len(self._idle)

    def take_idle(self) -> WorkerConnection | None:
        """An idle connection, the most recently used one first; None if there is none."""
        while self._idle:
            connection, since = self._idle.popitem()
            if self._clock() - since < IDLE_LIFE:
                return connection
            connection.abort()
        return None

    def connect(
        self, ready: Callable[[WorkerConnection], None], failed: Callable[[NoConnection], None]
    ) -> asyncio.Task[None]:
        """Call `ready` with a new connection, or `failed`. Neither is called after the task was cancelled."""
        task = asyncio.get_running_loop().create_task(self._connect(ready, failed))
        self._connecting[task] = failed
        task.add_done_callback(self._connecting.pop)
        return task

    async def _connect(self, ready: Callable[[WorkerConnection], None], failed: Callable[[NoConnection], None]) -> None:
        if self._cut is not None:
            failed(NoConnection(self._cut))
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    for_loop(lambda: WorkerConnection(self._heads, self._give_back, self._discard)),
                    self.address.host,
                    self.address.port,
                    ssl=self._tls,
                )
        except TimeoutError:
            failed(NoConnection(f"no connection within {self._connect_timeout:g} s"))
        except OSError as error:
            failed(NoConnection(error.strerror or str(error), error.errno in _OURS))
        except Exception as error:  # noqa: BLE001 -- such as UnicodeError for a host name; whoever waits is told
            failed(NoConnection(f"{type(error).__name__}: {error}"))
        else:
            self._open.add(connection)
            ready(connection)

    def _give_back(self, connection: WorkerConnection, usable: bool = True) -> None:
        self.ended += 1
        if usable:
            now = self._clock()
            self._idle[connection] = now
            self._close_oldest(now)  # after a rush most are not taken again, and not every worker closes them

    def close_expired(self) -> None:
        """To be called now and then: once requests stop coming, nothing else closes what is idle after a rush."""
        now = self._clock()
        while self._close_oldest(now):
            pass

    def _close_oldest(self, now: float) -> bool:
        """Of the idle ones, if it has been idle for too long."""
        oldest = next(iter(self._idle), None)
        if oldest is None or now - self._idle[oldest] < IDLE_LIFE:
            return False
        del self._idle[oldest]
        oldest.abort()
        return True

    def _discard(self, connection: WorkerConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    @property
    def is_cut(self) -> bool:
        return self._cut is not None

    def cut(self, reason: str) -> None:
        """Break off all requests in flight and tell their receivers. From now on connecting fails for `reason`."""
        self._cut = reason
        for task, failed in list(self._connecting.items()):
            if not task.cancelling() and task.cancel():  # else the callback was called already
                failed(NoConnection(reason))
        for connection in list(self._open):
            connection.cut(reason)
        self._idle.clear()

    def close(self) -> None:
        """Abort every connection, busy ones too."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
