"""Heads: what a request carries, what may pass through, and how heads are written."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable
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
"""One line for each router that a request has come through: its id."""
AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
REQUEST_HEADERS = frozenset(
    (
        *(b"accept", b"accept-encoding", b"accept-language", b"content-type", b"user-agent"),
        *(b"traceparent", b"tracestate", b"baggage"),  # W3C Trace Context and Baggage, which vLLM reads
        *(b"openai-organization", b"openai-project", b"openai-beta", b"anthropic-version", b"anthropic-beta"),
    )
)
"""What of a request's headers goes to a worker. Engines take orders by header, such as X-data-parallel-rank, and new
ones come with each version: hence a list of what passes and not of what does not."""
RESPONSE_HEADERS = frozenset(
    (
        *(b"content-type", b"content-encoding", b"content-disposition", b"cache-control", b"date"),
        *(b"retry-after", b"www-authenticate", b"allow"),
        *(b"openai-model", b"openai-organization", b"openai-processing-ms", b"openai-version"),
    )
)
"""What of an answer's headers goes to the client: what it needs to read the answer. Not who made it (Server, Via),
where it is (Location), nor what would act on a browser in this router's name (Set-Cookie, CORS)."""

CLOSES = b"connection: close\r\n"
STAYS = b"connection: keep-alive\r\n"
"""For clients of HTTP/1.0, which take the end of the connection for the answer's end where they are not told this."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Passing(NamedTuple):
    """What workers are told of a request's headers."""

    names: Collection[bytes] = REQUEST_HEADERS | {AUTHORIZATION}
    """In lower case; what is not among them ends here."""
    lines: bytes = b""
    """What they are told besides: the key that they want, where there is one, and the way that the request took."""
    router_id: bytes = b""
    """That comes back where a worker leads to this router."""


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
    """The header lines that go to the worker: those that may pass, as they came, and what it is told besides."""
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
    own = (first(headers, name) for name in (REQUEST_ID, TARGET_WORKER, TTFT_SLO, PRIORITY))
    return RequestHead(method, target, path, headers, keep_alive, http_1_0, passed_on, *own)


_ENCODINGS = re.compile(rb"^accept-encoding: .*\r\n", re.MULTILINE)


def unencoded(request: Request) -> Request:
    """The same, for an answer that the router reads itself."""
    head = request.head
    passed_on = _ENCODINGS.sub(b"accept-encoding: identity\r\n", head.passed_on)
    return Request(head._replace(passed_on=passed_on), request.body)


def new_request_id() -> bytes:
    return b"%032x" % random.getrandbits(128)


def with_request_id(response: Response, given: bytes | None) -> Response:
    """`given`: the request's, None where it has none yet."""
    return response._replace(headers=(*response.headers, (REQUEST_ID, given or new_request_id())))


def first(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name` (lower case)."""
    return next((value for key, value in headers if key == name), None)


def connection_line(keep_alive: bool, http_1_0: bool) -> bytes:
    """What a client is to be told of its connection."""
    if keep_alive:
        return STAYS if http_1_0 else b""
    return CLOSES


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Unknown"))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def may_pass(headers: Headers, names: Collection[bytes]) -> Headers:
    """Those of `names`, without what `Connection` says concerns this hop alone."""
    hop = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [header for header in headers if header[0] in names and header[0] not in hop]


def write_response(response: Response, connection: bytes, head_only: bool = False) -> bytes:
    """The bytes of a whole answer; `connection`: what is said of that, as a line; `head_only` for HEAD."""
    head = status_line(response.status) + header_lines(response.headers)
    head += b"content-type: %s\r\ncontent-length: %d\r\n" % (response.content_type, len(response.body))
    head += connection + b"\r\n"
    return head if head_only else head + response.body
