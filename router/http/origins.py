"""Which web pages of other origins may read answers: what browsers ask for and are told (CORS). Pure.

https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Collection

from router.http.messages import Headers, Response, first, header_lines

ANY = "*"
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_KEPT = b"600"
"""Seconds for which a browser need not ask again: the most that all heed."""


class Origins:
    def __init__(self, allowed: Collection[str]) -> None:
        """Each as browsers send it, such as https://chat.example.com; `ANY` for all."""
        self._any = ANY in allowed
        self._allowed = frozenset(each.encode() for each in allowed)

    def answer_lines(self, headers: Headers) -> bytes:
        """Header lines for the answer to a request with these headers; b"" if no allowed page asks."""
        return header_lines(self._told(headers))

    def labelled(self, response: Response, headers: Headers) -> Response:
        """`response`, to a request with these headers, so that an allowed page can read it."""
        return response._replace(headers=(*response.headers, *self._told(headers)))

    def is_preflight(self, method: bytes, headers: Headers) -> bool:
        """Whether a request is the question that a browser asks before one of an allowed page's."""
        asks = method == b"OPTIONS" and first(headers, b"access-control-request-method") is not None
        return asks and bool(self._told(headers))

    def preflight(self, headers: Headers) -> Response:
        """What answers it, with its `answer_lines`."""
        asked = first(headers, b"access-control-request-headers")
        may = ((b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _KEPT))
        named = ((b"access-control-allow-headers", asked),) if asked else ()
        return Response(200, content_type=b"text/plain", headers=(*may, *named))

    def _told(self, headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
        origin = first(headers, b"origin")
        if origin is None or not (self._any or origin in self._allowed):
            return ()
        shown = (b"access-control-expose-headers", b"*")
        if self._any:
            return (b"access-control-allow-origin", b"*"), shown
        return (b"access-control-allow-origin", origin), shown, (b"vary", b"origin")
