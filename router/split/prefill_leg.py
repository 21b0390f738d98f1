"""The prefill leg of a split request: its answer is read whole and never shown to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from engines.disaggregation.answer import Prefilled, read_answer
from router.http.chunked import decode_chunks
from router.http.messages import Request, Response, first
from router.http.upstream import Head
from router.proxy.failures import Failure, answered
from router.proxy.legs import Leg
from router.proxy.sending import Sending
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

MOST_BYTES = 16 * 1024**2
"""The largest answer that is read; it holds one token, and block ids."""
_BUSY = 429
_TYPE = b"content-type"


class Owner(Protocol):
    """Told of the leg's end: exactly one method is called, unless it cancels the leg."""

    def on_prefilled(self, answer: Prefilled) -> None: ...

    def on_prefill_failed(self, failure: Failure, answer: Response | None) -> None:
        """`answer`: the worker's own, where there was one."""

    def on_prefill_refused(self, refusal: Response) -> None:
        """The worker says that the request is wrong, so another would say the same."""

    def start_over(self, worker: Worker) -> bool:
        """As `Exchange.start_over`; the leg goes on if it returns False."""


class PrefillLeg:
    """Implements `upstream.Receiver`. Releases its reservation, however it ends."""

    __slots__ = (
        "_body",
        "_clock",
        "_head",
        "_length",
        "_over",
        "_owner",
        "_request",
        "_request_id",
        "_sending",
        "_timer",
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
        self._sending: Sending | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self._head: Head | None = None
        self._body: list[bytes] = []
        self._length = 0

    def start(self, timeout: float) -> None:
        """`timeout`: seconds until it must have answered."""
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out, timeout)
        self._sending = Sending(self.leg, self, self.fail, head_only=False)
        self._sending.start(self._request, self._request_id)

    def _time_out(self, timeout: float) -> None:
        self.fail(Failure("stalled", f"did not answer its part within {timeout:g} s"))

    def cancel(self) -> None:
        """Give the leg up. Its connection is cut, which tells the worker to stop."""
        if self._end():
            self.leg.reservation.release(self._clock())

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:  # noqa: ARG002 -- a Receiver
        self._head = head

    def on_body(self, data: bytes, boundary: int) -> None:  # noqa: ARG002 -- a Receiver
        self._body.append(data)
        self._length += len(data)
        if self._length > MOST_BYTES:
            self.fail(Failure("error", f"answered its part with more than {MOST_BYTES} bytes"))

    def on_chunks(self, chunks: int) -> None: ...

    def on_end(self) -> None:
        head, body = self._head, b"".join(self._body)
        if self._over or head is None:
            return
        self._sending = None  # its connection is back in the pool
        if head.framing == "chunked":
            body = decode_chunks(body)
        if head.status == 200:
            self._take(body)
        elif 400 <= head.status < 500 and head.status != _BUSY:
            self._end()
            self._release(done=False)
            self._owner.on_prefill_refused(_response(head, body, self.leg.worker))
        else:
            own = _response(head, body, self.leg.worker) if head.status >= _BUSY else None
            self.fail(answered(head.status), own)

    def on_broken(self, reason: str) -> None:
        stale = self._sending is not None and self._sending.was_stale(self._clock() - self.began)
        if not (stale and self._owner.start_over(self.leg.worker)):
            self.fail(Failure("broken", f"broke off: {reason}"))

    # -- inside

    def _take(self, body: bytes) -> None:
        try:
            answer = read_answer(body)
        except ValueError:
            self.fail(Failure("error", "answered its part with something else than JSON"))
            return
        if answer.aborted:
            self.fail(Failure("error", "aborted its part"))
            return
        if answer.prompt_tokens is not None:
            answer = answer._replace(cached_tokens=self.leg.worker.reported(answer.cached_tokens))
        self._end()
        self._release(done=True)
        self._owner.on_prefilled(answer)

    def fail(self, failure: Failure, answer: Response | None = None) -> None:
        if self._end():
            self._release(done=False)
            self._owner.on_prefill_failed(failure, answer)

    def _release(self, *, done: bool) -> None:
        now, booking = self._clock(), self.leg.reservation
        try:
            if done:
                booking.first_token(now)
        except Exception:  # whatever it is, the answer goes on to the decode worker
            logger.exception("A prefill could not be learned from")
        booking.release(now)

    def _end(self) -> bool:
        """End the leg, and cut its connection if the answer is not complete; returns whether it was still under way."""
        over, self._over = self._over, True
        if self._timer:
            self._timer.cancel()
        sending, self._sending = self._sending, None
        if sending:
            sending.drop()
        return not over


def _response(head: Head, body: bytes, worker: Worker) -> Response:
    """The worker's answer for the client, with its name and the headers that may pass, such as Retry-After."""
    lines = head.passed_on.split(b"\r\n")[1:-1]
    headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
    kind = first(headers, _TYPE) or b"application/json"
    passed = (header for header in headers if header[0] != _TYPE)
    return Response(head.status, body, kind, (*passed, (b"x-router-worker", worker.id.encode())))
