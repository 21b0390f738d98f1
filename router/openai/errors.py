"""Errors in the shape that OpenAI's clients understand, and Anthropic's, who look for a `type` beside it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.http.messages import Response

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


Header = tuple[bytes, bytes]


class BadRequest(Exception):
    """A request that cannot be served; carries its answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        header: Header | None = None,
    ) -> None:
        super().__init__(message)
        self.response = error_response(status, message, code=code, param=param, header=header)


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    details: Mapping[str, float] | None = None,
    header: Header | None = None,
) -> Response:
    """`code` defaults to the status, as engines have it; `details` stand beside it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code or status, **(details or {})}
    body = msgspec.json.encode({"error": error, "type": "error"})
    return Response(status, body, headers=(header,) if header else ())


def error_event(status: int, message: str) -> bytes:
    """A server-sent event that ends a stream which cannot go on."""
    return b"data: %s\n\n" % error_response(status, message).body
