"""Heads: what a request carries, what may pass through, and how heads are written."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, in the order received."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
"""RFC 9110 section 7.6.1, with the customary rest: they end at each hop."""

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Request(NamedTuple):
    """One complete request. `target` is the path with its query, as received."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes
    keep_alive: bool
    http_1_0: bool = False

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case)."""
        return next((value for key, value in self.headers if key == name), None)


class Response(NamedTuple):
    """A whole answer of the router's own."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def status_line(status: int) -> bytes:
    return b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Unknown"))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def end_to_end(headers: Headers) -> Headers:
    """Without the headers that concern this hop alone, those that `Connection` names included."""
    dropped: Iterable[bytes] = HOP_BY_HOP
    for name, value in headers:
        if name == b"connection":
            dropped = {*dropped, *(token.strip().lower() for token in value.split(b","))}
    return [header for header in headers if header[0] not in dropped]


def write_response(response: Response, keep_alive: bool, head_only: bool = False) -> bytes:
    """The bytes of a whole answer; `head_only` for HEAD."""
    head = status_line(response.status) + header_lines(response.headers)
    head += b"content-type: %s\r\ncontent-length: %d\r\n" % (response.content_type, len(response.body))
    head += b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
    return head if head_only else head + response.body
