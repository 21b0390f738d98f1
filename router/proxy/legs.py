"""What an exchange sends to workers: the whole of a request, or its two parts; and the heads that go with them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engines.disaggregation.answer import Prefilled
from router.http.messages import Request
from router.http.upstream import Head
from router.scheduling.booking import Booking
from router.scheduling.decision import Decision
from router.workers.worker import Worker

Part = Literal["whole", "prefill", "decode"]
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))


class Leg:
    """One attempt: the worker, why it was chosen, what was booked there, header lines for it and for its answer."""

    __slots__ = ("answer_lines", "body", "decision", "header_lines", "part", "reservation", "target", "worker")

    def __init__(
        self,
        worker: Worker,
        decision: Decision,
        reservation: Booking,
        header_lines: bytes,
        answer_lines: bytes = b"",
        body: bytes | None = None,
        part: Part = "whole",
    ) -> None:
        self.worker = worker
        self.decision = decision
        self.reservation = reservation
        self.header_lines = header_lines
        self.answer_lines = answer_lines
        self.body = body
        """What the worker is sent; None: the client's body."""
        self.part: Part = part
        self.target: bytes | None = None
        """The path, with its query, that the worker is asked for; None: the client's."""

    def body_of(self, request: Request) -> bytes:
        """What the worker is sent of `request`."""
        return request.body if self.body is None else self.body


class Pair(NamedTuple):
    """Two legs of one request. `decode` None: it is chosen when the prefill has answered."""

    prefill: Leg
    decode: Leg | None
    number: int
    """The number of the pair's KV transfer, which no other pair has."""
    prefill_timeout: float
    """Seconds that the first leg may take."""
    decode_timeout: float | None
    """Seconds that may pass after it until the second begins to answer; None: for ever."""


class Parted(NamedTuple):
    """How the two parts of a split request went; times are in seconds."""

    prefill_worker: str
    prefill: float
    """From sending it to its answer."""
    transfer: float | None
    """From then to the first byte of the decode worker's answer."""
    answer: Prefilled
    """What the prefill worker answered."""


def request_head(request: Request, request_id: bytes, leg: Leg) -> bytes:
    head, address = request.head, leg.worker.pool.address
    body = leg.body_of(request)
    length = b""
    if body or head.method in _WITH_BODY:
        length = b"content-length: %d\r\n" % len(body)
    return b"%s %s%s HTTP/1.1\r\n%shost: %s\r\nx-request-id: %s\r\n%s%s\r\n" % (
        head.method,
        address.base,
        leg.target or head.target,
        head.passed_on,
        address.authority,
        request_id,
        leg.header_lines,
        length,
    )


def response_head(head: Head, leg: Leg, request_id: bytes, framing: bytes) -> bytes:
    overlap = leg.decision.overlap_tokens
    told = leg.answer_lines if overlap is None else b"x-router-overlap-tokens: %d\r\n%s" % (overlap, leg.answer_lines)
    named = leg.worker.id.encode()
    return b"%sx-request-id: %s\r\nx-router-worker: %s\r\n%s%s\r\n" % (head.passed_on, request_id, named, told, framing)
