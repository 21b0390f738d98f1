"""Heads: what a request carries, what may pass through, and how heads are written."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, in the order received."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
"""RFC 9110 section 7.6.1, with the customary rest: they end at each hop."""

REQUEST_ID = b"x-request-id"
TARGET_WORKER = b"x-router-target-worker"
TTFT_SLO = b"x-router-ttft-slo"
PRIORITY = b"x-router-priority"
ARM = b"x-router-arm"
OWN_REQUEST_HEADERS = frozenset((b"host", b"content-length", b"expect", REQUEST_ID, TARGET_WORKER, TTFT_SLO, PRIORITY))
OWN_RESPONSE_HEADERS = frozenset(
    (
        b"content-length",
        REQUEST_ID,
        b"x-router-worker",
        b"x-router-prefill-worker",
        b"x-router-overlap-tokens",
        b"x-router-store-tokens",
        ARM,
    )
)
"""Headers that this router writes itself, or keeps to itself."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class RequestHead(NamedTuple):
    """A request but for its body, and so the same each time that a client repeats itself."""

    method: bytes
    target: bytes
    """The path with its query, as received."""
    path: bytes
    headers: Headers
    keep_alive: bool
    http_1_0: bool
    passed_on: bytes
    """The header lines that go to the worker as they came."""
    request_id: bytes | None
    target_worker: bytes | None
    ttft_slo: bytes | None = None
    priority: bytes | None = None


class Request(NamedTuple):
    """One complete request."""

    head: RequestHead
    body: bytes


class Response(NamedTuple):
    """A whole answer of the router's own."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def request_head(method: bytes, target: bytes, headers: Headers, keep_alive: bool, http_1_0: bool) -> RequestHead:
    passed_on = header_lines(end_to_end(headers, OWN_REQUEST_HEADERS))
    path = target.partition(b"?")[0]
    own = (first(headers, name) for name in (REQUEST_ID, TARGET_WORKER, TTFT_SLO, PRIORITY))
    return RequestHead(method, target, path, headers, keep_alive, http_1_0, passed_on, *own)


def first(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name` (lower case)."""
    return next((value for key, value in headers if key == name), None)


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Unknown"))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def end_to_end(headers: Headers, without: Collection[bytes] = ()) -> Headers:
    """Without the headers that concern this hop alone, those that `Connection` names included, and `without`."""
    dropped = {*HOP_BY_HOP, *without}
    for name, value in headers:
        if name == b"connection":
            dropped.update(token.strip().lower() for token in value.split(b","))
    return [header for header in headers if header[0] not in dropped]


def write_response(response: Response, keep_alive: bool, head_only: bool = False) -> bytes:
    """The bytes of a whole answer; `head_only` for HEAD."""
    head = status_line(response.status) + header_lines(response.headers)
    head += b"content-type: %s\r\ncontent-length: %d\r\n" % (response.content_type, len(response.body))
    head += b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
    return head if head_only else head + response.body
