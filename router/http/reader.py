"""Reads a client's requests: finds where each begins and ends, and refuses what is too large or cannot be read.

A head like the last one is not parsed again (`router.http.repeated`). No I/O: what was read is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import httptools

from router.http.clients import LARGE, Shared
from router.http.messages import (
    CAME_BACK,
    REQUEST_ID,
    VIA,
    Headers,
    Passing,
    Request,
    RequestHead,
    Response,
    first,
    header_lines,
    origin_form,
    request_head,
    with_request_id,
)
from router.http.origins import Origins
from router.http.repeated import RepeatedRequest, repeated_request

MAX_HEAD = 64 * 1024
"""Most bytes of request line and headers, or of trailers; more is answered with 431."""
PIECES = 1024
"""Most pieces in which a body is kept, plus one for each 256 bytes of it: each piece takes some 50 bytes itself."""
_CAME_BACK_TEXT = (
    "The request has come back to this router: one of its workers, or of a router behind it, is this router itself. "
    "A worker's URL must lead to an engine."
)
_AS_IT_IS = frozenset((b"identity", b"", b"utf-8", b"utf8"))
"""What clients state as Content-Encoding of a body that is not encoded: some take it for the charset's place."""
_PART = 16 * 1024
"""Bytes that are parsed at a time. The event loop hands over a quarter of a megabyte, which may be thousands of
requests or chunks: each takes microseconds, and nobody else is served meanwhile."""
_MOST_REQUESTS = 16
_MOST_CHUNKS = 512
"""When a part had more, the next one is left for later."""
_MOST_MISSES = 4
"""Heads in a row, each unlike the one before, after which a connection's heads are no longer remembered."""

CONTINUE: Final = "continue"
"""The client waits for a word before it sends a body."""
Read: TypeAlias = Request | Response | Literal["continue"]
"""A complete request, whose body stays counted; or the refusal of one, after which nothing is read; or `CONTINUE`."""
RefuseText = Callable[[int, str], Response]
"""Makes the answer (status, message) to a request that cannot be read."""
Admit = Callable[[bytes, Headers], Response | None]
"""None if a request with this target and these headers may send its body; else the answer to it."""


class RequestReader:
    """The requests of one connection."""

    __deletable__ = ("_parser",)  # for mypyc

    def __init__(
        self,
        refuse: RefuseText,
        shared: Shared,
        passing: Passing,
        admit: Admit | None = None,
        origins: Origins | None = None,
    ) -> None:
        """`shared`: gets the bytes of a large body that has arrived in part. `origins`: whose pages may read answers;
        None: no other's."""
        self._refuse = refuse
        self._shared = shared
        self._limits = shared.limits
        # One that could never be held is too large: there is no use in trying it again later.
        self._most_body = min(self._limits.max_body, self._limits.max_buffered)
        self._passing = passing
        self._admit = admit
        self._origins = origins
        self._read: list[Read] = []
        self._refused = False
        self._parser = httptools.HttpRequestParser(self)
        self._between = True  # the parser is between two messages
        self._begins = b""  # the first piece of the message being parsed
        self._repeated: RepeatedRequest | None = None
        self._misses = 0  # heads in a row that were unlike the remembered one
        self._missing = 0  # bytes still to come of a body that bypasses the parser
        self._counted = 0  # bytes of its body that are counted in `shared.buffered`
        self._body: list[bytes] = []
        self._pieces = 0  # of bodies, in the present call
        self.unread = b""
        """What has come and is read with what comes next."""
        self._reset_message()

    @property
    def in_part(self) -> bool:
        """Whether a request has arrived in part."""
        return bool(self._missing or not self._between)

    def read(self, data: bytes) -> list[Read]:
        """What has become complete with `data`, or with so much of it as may be read at a time."""
        data, self.unread = self.unread + data, b""
        self._pieces = 0
        if self._missing:
            data = self._take_missing(data)
        elif self._between and self._repeated:
            data = self._take_repeated(self._repeated, data)
        if data and not self._refused:
            self._feed_in_parts(data)
        read, self._read = self._read, []
        return read

    def drop(self) -> None:
        """Forget the request that is being read, and what has come behind it."""
        self._shared.buffered -= self._counted
        self.unread = b""
        self._body.clear()
        self._counted = self._missing = 0

    def close(self) -> None:
        """Nothing more is read."""
        self.drop()
        del self._parser  # it refers to this object: the cycle would wait for the garbage collector

    # -- a head like the last one

    def _take_repeated(self, repeated: RepeatedRequest, data: bytes) -> bytes:
        """Reads a request whose head is like the last one. Returns what is left to parse."""
        found = repeated.find(data)
        if not found or found[1] > self._most_body:
            self._misses += 1
            self._repeated = None
            return data
        self._misses = 0
        start, length = found
        end = start + length
        if end > len(data) or length > LARGE:
            self._missing = length
            return self._take_missing(data[start:])
        self._complete(repeated.head, data[start:end])
        return data[end:]

    def _take_missing(self, data: bytes) -> bytes:
        """Reads more of a body. Returns what follows the body."""
        rest = data[self._missing :]
        piece = data[: self._missing] if rest else data
        self._missing -= len(piece)
        self._add(piece)
        if not self._missing and self._repeated:
            pieces, self._body = self._body, []
            self._body_size = 0
            self._complete(self._repeated.head, b"".join(pieces))
        return rest

    # -- the parser

    def _feed_in_parts(self, data: bytes) -> None:
        for at in range(0, len(data), _PART):
            if self._refused:
                return
            if len(self._read) > _MOST_REQUESTS or self._pieces > _MOST_CHUNKS:
                self.unread = data[at:]
                return
            end = at + _PART
            part = data[at:end]
            if self._between:
                self._begins = part if at else data
            self._feed(part)

    def _feed(self, data: bytes) -> None:
        try:
            while data and not self._refused:  # the parser stops behind each offer to upgrade
                self._no_content += len(data)
                data = self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse_message(400, f"The request is not valid HTTP: {error}.")
        if self._no_content > MAX_HEAD:
            part = "trailer" if self._headers_done else "head"
            self._refuse_message(431, f"The request's {part} is larger than {MAX_HEAD} bytes.")

    def _parse(self, data: bytes) -> bytes:
        """Feeds the parser. Returns what is left to parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def _decline_upgrade(self) -> None:
        """Read a message with an offer to switch protocols again, without the offer. (An answer alone declines it, but
        the parser ends such a message with its head, and would take its body for the next request.)"""
        declined, self._parser = self._parser, httptools.HttpRequestParser(self)
        if self._between:  # CONNECT, which has no body
            return
        line = b"%s %s HTTP/%s\r\n" % (declined.get_method(), self._target, declined.get_http_version().encode())
        head = line + header_lines(header for header in self._headers if header[0] != b"upgrade") + b"\r\n"
        self._reset_message()
        self._begins = b""  # this head was changed, and must not be recognised again
        self._parser.feed_data(head)

    @property
    def _offers_upgrade(self) -> bool:
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        self._between = False

    def _reset_message(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._body = []
        self._body_size = 0
        self._no_content = 0  # bytes outside of bodies since the last one: the parser takes lines of any length
        self._headers_done = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:  # trailers are not headers: RFC 9110 section 6.5.1
            self._headers.append((name.lower(), value.rstrip(b" \t")))  # the parser leaves what is behind a value

    def on_headers_complete(self) -> None:
        self._headers_done = True
        self._no_content = 0
        if self._offers_upgrade:
            return
        if fault := _fault(self._parser.get_http_version(), [name for name, _ in self._headers]):
            self._refuse_message(400, fault)
            return
        if sum(len(name) + len(value) + 4 for name, value in self._headers) + len(self._target) > MAX_HEAD:
            self._refuse_message(431, f"The request's head is larger than {MAX_HEAD} bytes.")
            return
        if not self._target.startswith(b"/"):
            self._target = origin_form(self._target)
        if refusal := self._refusal():
            self._refuse_with(refusal)
            return
        for name, value in self._headers:
            self._heed(name, value)
        if (first(self._headers, b"expect") or b"").lower() == b"100-continue":
            self._let_continue()  # last, since any of the others may have refused it

    def _refusal(self) -> Response | None:
        """Of a request that may not send its body. What a browser asks before a page's request never has a key."""
        if self._admit is None or self._is_preflight:
            return None
        return self._admit(self._target, self._headers)

    @property
    def _is_preflight(self) -> bool:
        if self._origins is None or not self._origins.is_preflight(self._parser.get_method(), self._headers):
            return False
        return not {name for name, _ in self._headers} & {b"content-length", b"transfer-encoding"}

    def _heed(self, name: bytes, value: bytes) -> None:
        if name == b"content-length" and int(value) > self._most_body:
            self._refuse_body()
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            self._refuse_message(501, "Of transfer codings only chunked is understood.")
        elif name == b"content-encoding" and _compresses(value):
            self._refuse_message(415, "The body is compressed, which engines do not take; send it as it is.")
        elif name == VIA and self._passing.router_id and self._passing.router_id in value:
            self._refuse_message(CAME_BACK, _CAME_BACK_TEXT)

    def _let_continue(self) -> None:
        """HTTP/1.0 clients do not know interim answers, even if they ask for one: RFC 9110 section 10.1.1."""
        if not self._refused and self._parser.get_http_version() != "1.0":
            self._read.append(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._no_content = 0
        if self._body_size + len(body) > self._most_body:
            self._refuse_body()
        elif not self._refused:
            self._add(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._between = True
        if self._refused:
            return
        parser = self._parser
        http_1_0 = parser.get_http_version() == "1.0"
        keep_alive = parser.should_keep_alive()
        head = request_head(parser.get_method(), self._target, self._headers, keep_alive, http_1_0, self._passing)
        if self._origins:
            head = head._replace(answer_lines=self._origins.answer_lines(self._headers))
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._repeated = repeated_request(self._begins, head) if self._misses < _MOST_MISSES else None
        self._begins = b""
        self._reset_message()
        self._complete(head, body)

    # -- what was read

    def _complete(self, head: RequestHead, body: bytes) -> None:
        if self._refused:
            return
        self._shared.buffered += held(body) - self._counted
        self._counted = 0
        self._read.append(Request(head, body))

    def _add(self, piece: bytes) -> None:
        self._pieces += 1
        self._body.append(piece)
        self._body_size += len(piece)
        if len(self._body) > PIECES + self._body_size // 256:
            self._body = [b"".join(self._body)]
        self._count()

    def _count(self) -> None:
        """Count a large body in `shared.buffered`, and refuse it if there is no room."""
        if self._body_size > LARGE and not self._refused:
            self._shared.buffered += self._body_size - self._counted
            self._counted = self._body_size
            if self._shared.buffered > self._limits.max_buffered:
                self._shared.refused["max_buffered"] += 1
                text = "The router holds as many bytes of requests as it may (--max-buffered); try again in a second."
                self._refuse_with(self._refuse(429, text)._replace(headers=((b"retry-after", b"1"),)))

    def _refuse_body(self) -> None:
        flag = "--max-body-size" if self._most_body == self._limits.max_body else "--max-buffered"
        self._refuse_message(413, f"The request's body is larger than {self._most_body} bytes ({flag}).")

    def _refuse_message(self, status: int, message: str) -> None:
        self._refuse_with(self._refuse(status, message))

    def _refuse_with(self, response: Response) -> None:
        if not self._refused:
            self._refused = True
            self._read.append(self.named(response))
            self.drop()

    def named(self, response: Response) -> Response:
        """With the id of the request that is being read, if its head is complete, and readable for who sent it."""
        if self._headers_done:
            told = self._origins.labelled(response, self._headers) if self._origins else response
            return with_request_id(told, first(self._headers, REQUEST_ID))
        if self._repeated and (self._missing or self._body_size):
            return with_request_id(response, self._repeated.head.request_id)
        return response


def held(body: bytes) -> int:
    """Bytes of it that are counted over all connections, from the first one read to the last of the answer."""
    size = len(body)
    return size if size > LARGE else 0


def _compresses(content_encoding: bytes) -> bool:
    return any(coding.strip().lower() not in _AS_IT_IS for coding in content_encoding.split(b","))


def _fault(version: str, names: list[bytes]) -> str | None:
    """Faults that the parser accepts, but that other parsers may read differently (request smuggling)."""
    if version not in {"1.0", "1.1"}:
        return f"HTTP/{version} is not spoken here."
    if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):  # RFC 9112 section 3.2
        return "A request must have one Host header."
    if version == "1.0" and b"transfer-encoding" in names:  # RFC 9112 section 6.1
        return "HTTP/1.0 knows no transfer codings."
    return None
