"""Errors in the shape that OpenAI's clients understand, and Anthropic's, who look for a `type` beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from engines.answers import mapping, parse, text
from router.http.messages import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ANTHROPICS = {503: "overloaded_error", 504: "timeout_error"}
"""From 500 on, by which clients of Anthropic's API decide whether to ask again."""
_RESPONSES, _MESSAGES = b"/v1/responses", b"/v1/messages"
"""Their events have names."""
_NAME = b"event: error\n"
"""Without it some take a stream for complete: Anthropic's clients, and the load generators aiperf and
sglang.bench_serving."""
_NUMBER = re.compile(rb'"sequence_number":\s*(\d{1,15})(?!\d)')
"""Of an event of /v1/responses. (In a text that tells of one, the quotes are escaped.)"""

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
    body = msgspec.json.encode(_told(status, message, code, param, details))
    return Response(status, body, headers=(header,) if header else ())


def _told(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    details: Mapping[str, float] | None = None,
    path: bytes = b"",
) -> dict[str, object]:
    error = {
        "message": message,
        "type": _type_of(status, path),
        "param": param,
        "code": code or status,
        **(details or {}),
    }
    return {"error": error, "type": "error"}


def _type_of(status: int, path: bytes) -> str:
    if status >= 500:
        return _ANTHROPICS.get(status, "api_error") if path.startswith(_MESSAGES) else "server_error"
    return _TYPES.get(status, "invalid_request_error")


def typed_for(path: bytes, response: Response) -> Response:
    """An error of the router's own with the type that clients of this path know."""
    if response.status < 500 or not path.startswith(_MESSAGES):
        return response
    kind = f'"type":"{_type_of(response.status, path)}"'
    return response._replace(body=response.body.replace(b'"type":"server_error"', kind.encode(), 1))


def error_event(status: int, message: str, path: bytes, latest: bytes) -> bytes:
    """A server-sent event that ends a stream which cannot go on. `path`: of its request. `latest`: its latest bytes."""
    return _event(status, message, _told(status, message, path=path), path, latest)


def as_event(status: int, answer: bytes, path: bytes) -> bytes:
    """An answer that comes whole (its body) as the one event of a stream that was begun before it came."""
    if status < 400:
        return b"".join(b"data: %s\n" % line for line in answer.splitlines()) + b"\n"
    said = mapping(parse(answer))
    own = mapping(said.get("error")) or (said if text(said.get("message")) else {})
    message = text(own.get("message")) or text(said.get("detail")) or f"The answer was {status}."
    told = _told(status, message, path=path)
    told["error"] = mapping(told["error"]) | own
    return _event(status, message, told, path, b"")


def _event(status: int, message: str, told: dict[str, object], path: bytes, latest: bytes) -> bytes:
    """Events of /v1/responses have numbers, and clients that know them by their form look for the error's fields beside
    these; others look for an object `error` there too. Where events have no names, its name comes last: clients that
    read lines have the message by then."""
    if path.startswith(_RESPONSES):
        number = max(map(int, _NUMBER.findall(latest)), default=-1) + 1
        told |= {"sequence_number": number, "code": str(status), "message": message, "param": None}
    data = b"data: %s\n" % msgspec.json.encode(told)
    return b"%s%s\n" % ((_NAME, data) if path.startswith((_RESPONSES, _MESSAGES)) else (data, _NAME))
