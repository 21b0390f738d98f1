"""A Mooncake master's HTTP surface, as the router asks it.

Which keys are there is asked while a request waits, several parts of a prompt at a time, so these questions go over
connections like those to workers: that takes half of the time that an HTTP client library does. The rest is asked
rarely, by aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import aiohttp
from yarl import URL

from engines.store import (
    Segment,
    Stored,
    query_path,
    read_counted,
    read_keys,
    read_present,
    read_query,
    read_segments,
)
from engines.store.master import METRICS
from engines.store.query import ALL_KEYS, SEGMENTS, in_parts, lease_path
from publishers.dialogue import MOST_BYTES, read_whole
from publishers.logs import log_event
from publishers.reasons import reason_of
from router.http.chunked import decode_chunks
from router.http.pool import Pool
from router.http.upstream import Head, WorkerConnection

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PATIENCE: Final = 1.0
"""Seconds that the master has for an answer."""
FAILURES, PAUSE = 3, 2.0
"""After this many failures in a row, it is left alone for this many seconds."""
MANY: Final = 32
"""Questions at a time: a master answers with a few threads."""
MOST_KEYS: Final = 1024**2
"""Bytes of the list of all keys that are looked at: it may be gigabytes."""


class Unanswered(Exception):
    """The master did not answer as it should; says how, for people."""


class StoreMaster:
    def __init__(self, url: str, session: aiohttp.ClientSession, tls: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._session = session
        self._pool = Pool(url, PATIENCE, tls)
        self._failures = 0
        """Since its last answer."""
        self._paused_until = 0.0
        address = self._pool.address
        self._before_path = b"GET " + address.base
        self._behind_path = b" HTTP/1.1\r\nHost: " + address.authority + b"\r\n\r\n"

    def begin(self, keys: Sequence[str]) -> Query:
        """Ask which of `keys` are there: over a connection that is open the question is on its way on return."""
        path = query_path(keys)
        if path is None or not keys:
            return Query(self._pool, None)
        return Query(self._pool, self._before_path + path.encode() + self._behind_path)

    # Its failures count together, whichever model was asked about: it is one master that answers or does not.

    @property
    def healthy(self) -> bool:
        return not self._failures

    def is_left_alone(self, now: float) -> bool:
        return now < self._paused_until

    def answered(self) -> None:
        """The master has answered a look-up, or told its keys."""
        if self._failures >= FAILURES:
            log_event(logger, logging.INFO, "The store answers again")
        self._failures = 0

    def failed(self, error: Unanswered, now: float) -> None:
        """It has not."""
        self._failures += 1
        if self._failures % FAILURES == 0:
            self._paused_until = now + PAUSE
        if self._failures == FAILURES:
            log_event(logger, logging.WARNING, "The store cannot be asked: routing goes on without it", reason=error)

    @property
    def crowded(self) -> bool:
        """So many questions are under way that nobody should ask several at a time."""
        return self._pool.busy >= MANY

    async def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` whose objects can be read."""
        found: set[str] = set()
        for part in in_parts(keys):
            found |= await self.begin(part).present()
        return found

    async def stored(self, keys: Sequence[str]) -> dict[str, Stored]:
        """The objects of `keys` that can be read."""
        found: dict[str, Stored] = {}
        for part in in_parts(keys):
            if path := query_path(part):
                found |= await self._read(path, read_query)
        return found

    async def segments(self) -> list[Segment]:
        """The memory that processes offer to the store."""
        return await self._read(SEGMENTS, read_segments)

    async def lease(self, key: str) -> bool:
        """Take a lease on an object, so that the master does not evict it meanwhile; returns whether it is there."""
        try:
            async with self._get(lease_path(key)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unanswered(error) from None

    async def keys_held(self) -> int:
        """How many keys there are; 0 if the master does not tell."""
        return (await self._read(METRICS, read_counted)).keys or 0

    async def some_keys(self) -> list[str]:
        """The first of all keys, about `MOST_KEYS` bytes of them."""
        try:
            async with self._get(ALL_KEYS) as answer:
                if answer.status != 200:
                    raise Unanswered(f"it answered {answer.status}")
                listed = b""
                while len(listed) < MOST_KEYS and (piece := await answer.content.readany()):
                    listed += piece
            return read_keys(listed.rpartition(b"\n")[0])
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _unanswered(error) from None

    async def _read(self, path: str, read: Callable[[bytes], _T]) -> _T:
        try:
            async with self._get(path) as answer:
                if answer.status != 200:
                    raise Unanswered(f"it answered {answer.status}")
                return read(await read_whole(answer))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _unanswered(error) from None

    def _get(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(URL(self._url + path, encoded=True), timeout=aiohttp.ClientTimeout(PATIENCE))

    def close_expired(self) -> None:
        """To be called now and then: once nobody asks, nothing else closes the connections that a rush has left."""
        self._pool.close_expired()

    def close(self) -> None:
        self._pool.close()


class Query:
    """Which keys are there: one question, and what becomes of it. Implements `upstream.Receiver`."""

    def __init__(self, pool: Pool, request: bytes | None) -> None:
        """`request` None: nothing can be asked, and nothing is there."""
        loop = asyncio.get_running_loop()
        self._pool = pool
        self._request = request or b""
        self._answer: asyncio.Future[bytes] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._connection: WorkerConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._head: Head | None = None
        self._body: list[bytes] = []
        self._length = 0
        if request is None:
            self._answer.set_result(b"")
            return
        self._timer = loop.call_later(PATIENCE, self._fail, f"no answer within {PATIENCE:g} s")
        idle = pool.take_idle()
        self._send(idle) if idle else self._connect()

    async def present(self) -> set[str]:
        """Raises Unanswered."""
        try:
            body = await self._answer
            return read_present(body) if self._request else set()
        except ValueError as error:
            raise Unanswered(str(error)) from None

    def drop(self) -> None:
        """Nobody waits for it; its connection can be used again when the answer is there."""
        self._answer.cancel()

    def _connect(self) -> None:
        self._connecting = self._pool.connect(self._send, lambda none: self._fail(none.reason))

    def _send(self, connection: WorkerConnection) -> None:
        self._connecting, self._connection = None, connection
        connection.send(self, self._request, b"", head_only=False)

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:  # noqa: ARG002 -- a Receiver
        self._head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002 -- a Receiver
        self._body.append(data)
        self._length += len(data)
        if self._length > MOST_BYTES:
            self._fail(f"more than {MOST_BYTES} bytes")

    def on_chunks(self, chunks: int) -> None: ...

    def on_end(self) -> None:
        head, body = self._head, b"".join(self._body)
        self._connection = None  # it is back in the pool
        if head is None or head.status != 200:
            self._fail(f"it answered {head.status if head else 'nothing'}")
        else:
            self._end()
            if not self._answer.done():
                self._answer.set_result(decode_chunks(body) if head.framing == "chunked" else body)

    def on_broken(self, reason: str) -> None:
        """A kept connection may have been closed by the master just as the question went out: then once more."""
        connection, self._connection = self._connection, None
        if connection and connection.requests > 1 and self._head is None:
            self._connect()
        else:
            self._fail(reason)

    # -- inside

    def _fail(self, reason: str) -> None:
        self._end()
        if not self._answer.done():
            self._answer.set_exception(Unanswered(reason))

    def _end(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._connecting:
            self._connecting.cancel()
        if self._connection:
            self._connection.abort()
            self._connection = None


def _unanswered(error: Exception) -> Unanswered:
    """A ValueError says what was wrong with an answer."""
    return Unanswered(str(error) if isinstance(error, ValueError) else reason_of(error))
