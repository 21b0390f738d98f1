"""Requests and responses: their heads, which headers pass through the router, and how heads are written."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, in the order received."""

REQUEST_ID = b"x-request-id"
TARGET_WORKER = b"x-router-target-worker"
TTFT_SLO = b"x-router-ttft-slo"
PRIORITY = b"x-router-priority"
ARM = b"x-router-arm"
VIA = b"x-router-via"
"""One line with the id of each router that a request has passed."""
CAME_BACK = 508
"""The status of an answer to a request that has come back to a router that it had passed."""
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
"""W3C Trace Context: the client's span that a request is a part of, and what tracing systems add."""
AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
REQUEST_HEADERS = frozenset(
    (
        *(b"accept", b"accept-encoding", b"accept-language", b"content-type", b"user-agent"),
        *(TRACEPARENT, TRACESTATE, b"baggage"),  # and W3C Baggage, all of which vLLM reads
        *(b"openai-organization", b"openai-project", b"openai-beta", b"anthropic-version", b"anthropic-beta"),
    )
)
"""Request headers that pass to workers. Engines take orders by header (X-data-parallel-rank), and each version may add
some, so this lists what passes rather than what does not."""
RESPONSE_HEADERS = frozenset(
    (
        *(b"content-type", b"content-encoding", b"content-disposition", b"cache-control", b"date"),
        *(b"retry-after", b"www-authenticate", b"allow"),
        *(b"openai-model", b"openai-organization", b"openai-processing-ms", b"openai-version"),
        b"metadata",  # of vLLM's embeddings as bytes: which bytes are whose, and the usage
    )
)
"""Response headers that pass to clients: what they need to read the answer. Not who made it (Server, Via), where it is
(Location), or what would act on a browser in this router's name (Set-Cookie, CORS)."""

UNBUFFERED = (b"x-accel-buffering", b"no")
"""Has nginx pass on each event of a stream as it comes: else it collects dozens of tokens at a time."""
CLOSES = b"connection: close\r\n"
STAYS = b"connection: keep-alive\r\n"
"""For HTTP/1.0 clients, which otherwise read until the connection ends."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Passing(NamedTuple):
    """Which of a request's headers workers get."""

    names: Collection[bytes] = REQUEST_HEADERS | {AUTHORIZATION}
    """In lower case; others do not pass."""
    lines: bytes = b""
    """Header lines added for workers: their API key, if there is one, and this router's id."""
    router_id: bytes = b""
    """This router's id: a request that already carries it has come back."""


class RequestHead(NamedTuple):
    """A request without its body: the same object each time that a client repeats its head."""

    method: bytes
    target: bytes
    """The path with its query, as received (a host before it is left out)."""
    path: bytes
    headers: Headers
    keep_alive: bool
    http_1_0: bool
    passed_on: bytes
    """The header lines for the worker: those that pass, as they came, and those that are added."""
    request_id: bytes | None
    target_worker: bytes | None
    ttft_slo: bytes | None = None
    priority: bytes | None = None
    answer_lines: bytes = b""
    """Header lines for its answer, whoever makes it."""


class Request:
    """One complete request."""

    __slots__ = ("body", "head")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body


class Response(NamedTuple):
    """A whole answer made by the router."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)


def origin_form(target: bytes) -> bytes:
    """A target without the host that clients of proxies name in it, and that a server must take (RFC 9112 section
    3.2.2). Which host it is makes no difference here, no more than the Host header does."""
    found = _ABSOLUTE.match(target)
    if not found:
        return target
    rest = target[found.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


def request_head(
    method: bytes,
    target: bytes,
    headers: Headers,
    keep_alive: bool,
    http_1_0: bool,
    passing: Passing = Passing(),  # noqa: B008 -- immutable
) -> RequestHead:
    passed_on = header_lines(may_pass(headers, passing.names)) + passing.lines
    path = target.partition(b"?")[0]
    request_id, worker = first(headers, REQUEST_ID), first(headers, TARGET_WORKER)
    slo, priority = first(headers, TTFT_SLO), first(headers, PRIORITY)
    return RequestHead(
        method, target, path, headers, keep_alive, http_1_0, passed_on, request_id, worker, slo, priority
    )


_ENCODINGS = re.compile(rb"^accept-encoding: .*\r\n", re.MULTILINE)


def unencoded(request: Request) -> Request:
    """The same request asking for an uncompressed answer, which the router can read."""
    head = request.head
    passed_on = _ENCODINGS.sub(b"accept-encoding: identity\r\n", head.passed_on)
    return Request(head._replace(passed_on=passed_on), request.body)


def new_request_id() -> bytes:
    return b"%032x" % random.getrandbits(128)


def with_request_id(response: Response, given: bytes | None) -> Response:
    """`given`: the request's id; None if it has none."""
    return response._replace(headers=(*response.headers, (REQUEST_ID, given or new_request_id())))


def first(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name` (lower case)."""
    return next((value for key, value in headers if key == name), None)


def connection_line(keep_alive: bool, http_1_0: bool) -> bytes:
    """The Connection header for a client."""
    if keep_alive:
        return STAYS if http_1_0 else b""
    return CLOSES


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Unknown"))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def may_pass(headers: Headers, names: Collection[bytes]) -> Headers:
    """The headers in `names`, except those that `Connection` declares to be for this hop only."""
    hop = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [header for header in headers if header[0] in names and header[0] not in hop]


def date_line(seconds: float) -> bytes:
    """The Date header for a time of the wall clock."""
    return b"date: %s\r\n" % formatdate(seconds, usegmt=True).encode()


def write_response(response: Response, connection: bytes, head_only: bool = False, date: bytes = b"") -> bytes:
    """The bytes of a whole answer. `connection`: its Connection header line; `head_only` for HEAD; `date`: its Date
    header line, which an answer of a worker's has already."""
    head = _head(response, b"content-length: %d\r\n" % len(response.body), connection, date)
    return head if head_only else head + response.body


def write_beginning(response: Response, connection: bytes, date: bytes) -> bytes:
    """The head of an answer whose body is to follow in chunks. `connection`, `date`: as above."""
    return _head(response, b"transfer-encoding: chunked\r\n", connection, date)


def _head(response: Response, framing: bytes, connection: bytes, date: bytes) -> bytes:
    lines = status_line(response.status) + header_lines(response.headers)
    if not any(name == b"date" for name, _ in response.headers):
        lines += date
    return b"%scontent-type: %s\r\n%s%s\r\n" % (lines, response.content_type, framing, connection)
