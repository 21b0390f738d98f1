"""Sends one request to one worker: over an idle connection if there is one, else over a new one.

A worker may close an idle connection just as it is reused. That is no failure, so the request is sent once more, over a
new connection. But since the worker may have received it the first time, a failure after that counts as if it had begun
to work on the request. For the same reason no part of a split request is sent once more: `Exchange.start_over` has both
made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.messages import Request
from router.http.pool import NoConnection
from router.http.upstream import Receiver, WorkerConnection
from router.proxy.failures import Failure
from router.proxy.legs import Leg, request_head

STALE_WITHIN = 1.0
"""Seconds after sending within which a connection that the worker had closed before turns out to be closed."""


class ReturnedConnection:
    """Stands for a connection that serves other requests by now: the last pieces that came over it."""

    __slots__ = ("latest", "recent")
    heard = True
    paused = False

    def __init__(self, recent: bytes, latest: bytes) -> None:
        self.recent, self.latest = recent, latest

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def pass_events(self, write: Callable[[bytes], None] | None) -> None: ...


class Sending:
    __slots__ = (
        "_connecting",
        "_head_only",
        "_on_failure",
        "_receiver",
        "_request",
        "_resent",
        "_reused",
        "connection",
        "leg",
    )

    def __init__(self, leg: Leg, receiver: Receiver, on_failure: Callable[[Failure], None], head_only: bool) -> None:
        """`on_failure` is called when no connection can be made; nothing more comes after that."""
        self.leg = leg
        self._receiver = receiver
        self._on_failure = on_failure
        self._head_only = head_only
        self._connecting: asyncio.Task[None] | None = None
        self._reused = False
        """Whether the connection has served another request before."""
        self._resent = False
        """Whether the request was sent before, over a connection that broke."""
        self._request = (b"", b"")
        """Head and body, as the worker is sent them."""
        self.connection: WorkerConnection | ReturnedConnection | None = None
        """Carries the request; None before there is one, and after `drop`."""

    def start(self, request: Request, request_id: bytes) -> None:
        leg = self.leg
        self._request = request_head(request, request_id, leg), leg.body_of(request)
        idle = leg.worker.pool.take_idle()
        if idle:
            self._send(idle)
        else:
            self._connect()

    def was_stale(self, after: float) -> bool:
        """Whether the worker may have closed the connection while it was idle. To be asked when it broke before any
        answer, `after` seconds from sending."""
        return self._reused and after <= STALE_WITHIN and not (self.connection and self.connection.heard)

    def again(self, after: float) -> bool:
        """If it `was_stale`, send the request again and return True."""
        if not self.was_stale(after):
            return False
        self._reused, self._resent = False, True
        self.connection = None
        self._connect()
        return True

    def drop(self) -> None:
        """Cut the connection, by which the worker knows that its answer is not wanted any more."""
        connecting, self._connecting = self._connecting, None
        if connecting:
            connecting.cancel()
        connection, self.connection = self.connection, None
        if connection:
            connection.abort()

    def settle(self) -> None:
        """The answer is complete and its connection free for others, though the answer is not processed yet."""
        if self.connection:
            self.connection = ReturnedConnection(self.connection.recent, self.connection.latest)

    def _connect(self) -> None:
        self._connecting = self.leg.worker.pool.connect(self._send, self._fail)

    def _send(self, connection: WorkerConnection) -> None:
        self._connecting = None
        self.connection = connection
        self._reused = connection.requests > 0
        connection.send(self._receiver, *self._request, self._head_only)

    def _fail(self, none: NoConnection) -> None:
        self._connecting = None
        if none.ours:
            reason = f"could not be asked, since the router can open no connection: {none.reason}"
            self._on_failure(Failure("unasked", reason, self._resent))
        else:
            self._on_failure(Failure("unreachable", f"cannot be reached: {none.reason}", self._resent))
