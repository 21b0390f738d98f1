"""The first part of a split request: asked of a prefill worker, read whole, never shown to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from engines.disaggregation.answer import Prefilled, read_answer
from router.http.chunked import decode_chunks
from router.http.messages import Request, Response
from router.http.upstream import Head, WorkerConnection
from router.legs import Leg, request_head

MOST_BYTES = 16 * 1024**2
"""Of an answer; it holds one token, and block ids."""
_BUSY = 429


class Owner(Protocol):
    """Exactly one of these is called, unless the leg is cancelled."""

    def on_prefilled(self, answer: Prefilled) -> None: ...

    def on_prefill_failed(self, reason: str, unreachable: bool, answer: Response | None) -> None:
        """`answer`: the worker's own, where there was one."""

    def on_prefill_refused(self, refusal: Response) -> None:
        """The worker says that the request is wrong: another would say the same."""


class PrefillLeg:
    """Implements `upstream.Receiver`. Gives back what was booked, however it ends."""

    __slots__ = (
        "_body",
        "_clock",
        "_connecting",
        "_head",
        "_length",
        "_over",
        "_owner",
        "_request",
        "_request_id",
        "_reused",
        "_timer",
        "_upstream",
        "began",
        "leg",
    )

    def __init__(self, leg: Leg, request: Request, request_id: bytes, owner: Owner, clock: Callable[[], float]) -> None:
        self.leg = leg
        self.began = clock()
        self._request = request
        self._request_id = request_id
        self._owner = owner
        self._clock = clock
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: WorkerConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reused = self._over = False
        self._head: Head | None = None
        self._body: list[bytes] = []
        self._length = 0

    def start(self, timeout: float) -> None:
        """`timeout`: seconds until it must have answered."""
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out, timeout)
        self._connect(fresh=False)

    def _connect(self, *, fresh: bool) -> None:
        pool = self.leg.worker.pool
        idle = None if fresh else pool.take_idle()
        if idle:
            self._on_connection(idle)
        else:
            self._connecting = pool.connect(self._on_connection, self._on_no_connection)

    def _on_connection(self, upstream: WorkerConnection) -> None:
        self._connecting = None
        if self._over:
            upstream.abort()
            return
        self._upstream = upstream
        self._reused = upstream.requests > 0
        head, body = request_head(self._request, self._request_id, self.leg), self.leg.body_of(self._request)
        upstream.send(self, head, body, head_only=False)

    def _on_no_connection(self, reason: str) -> None:
        self._connecting = None
        self._fail(f"cannot be reached: {reason}", unreachable=True)

    def _time_out(self, timeout: float) -> None:
        self._fail(f"did not answer its part within {timeout:g} s")

    def cancel(self) -> None:
        """Nobody waits for it any more: the worker sees its client gone."""
        if self._end():
            self.leg.reservation.release(self._clock())

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:  # noqa: ARG002 -- a Receiver
        self._head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002 -- a Receiver
        self._body.append(data)
        self._length += len(data)
        if self._length > MOST_BYTES:
            self._fail(f"answered its part with more than {MOST_BYTES} bytes")

    def on_chunks(self, chunks: int) -> None: ...

    def on_end(self) -> None:
        head, body = self._head, b"".join(self._body)
        if self._over or head is None:
            return
        self._upstream = None  # it is back in its pool
        if head.framing == "chunked":
            body = decode_chunks(body)
        if head.status == 200:
            self._take(body)
        elif 400 <= head.status < 500 and head.status != _BUSY:
            self._end()
            self._release(done=False)
            self._owner.on_prefill_refused(Response(head.status, body))
        else:
            own = Response(head.status, body) if head.status >= _BUSY else None
            self._fail(f"answered {head.status}", answer=own)

    def on_broken(self, reason: str) -> None:
        if self._reused and self._head is None and not self._over:
            # It closed an idle connection just as it was reused: no sign that it is in trouble.
            self._reused = False
            self._connect(fresh=True)
        else:
            self._fail(f"broke off: {reason}")

    # -- inside

    def _take(self, body: bytes) -> None:
        try:
            answer = read_answer(body)
        except ValueError:
            self._fail("answered its part with something else than JSON")
            return
        self._end()
        self._release(done=True)
        self._owner.on_prefilled(answer)

    def _fail(self, reason: str, *, unreachable: bool = False, answer: Response | None = None) -> None:
        if self._end():
            self._release(done=False)
            self._owner.on_prefill_failed(reason, unreachable, answer)

    def _release(self, *, done: bool) -> None:
        now, booking = self._clock(), self.leg.reservation
        if done:
            booking.first_token(now)
        booking.release(now)

    def _end(self) -> bool:
        """Whether it was still under way."""
        over, self._over = self._over, True
        if self._timer:
            self._timer.cancel()
        if self._connecting:
            self._connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream and not over:
            upstream.abort()
        return not over
