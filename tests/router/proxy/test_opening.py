"""How a stream begins: a decode worker's, cut anywhere, and any other."""

from __future__ import annotations

import pytest

from router.http.chunked import ChunkedBody
from router.http.relay import HELD
from router.proxy.opening import Opening, error_status
from tests.router.http.test_chunked import chunk

ROLE = chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n')
TOKEN = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n')
ABORT = chunk(b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n')
TEXT = chunk(b'data: {"text":"a","meta_info":{"id":"x","finish_reason":null,"prompt_tokens":9}}\n\n')
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def error(code: int) -> bytes:
    return chunk(b'data: {"error": {"message": "\\"code\\": 500", "type": "x", "code": %d}}\n\n' % code)


DIED = chunk(
    b'data: {"error": {"message": "EngineCore encountered an issue. See", "type": "BadRequestError", "code": 400}}\n\n'
)
"""As vLLM 0.12 says it."""


def given_up(code: str) -> bytes:
    """By SGLang's /generate."""
    reason = b'{"type":"abort","message":"\\"status_code\\": 500","status_code":%s,"err_type":null}' % code.encode()
    return chunk(b'data: {"text":"","meta_info":{"id":"x","finish_reason":%s,"prompt_tokens":9}}\n\n' % reason)


def named(kind: str) -> bytes:
    """On /v1/messages."""
    return chunk(b'event: error\ndata: {"type":"error","error":{"type":"%s","message":"x"}}\n\n' % kind.encode())


def judged(pieces: list[bytes]) -> tuple[bool, bytes]:
    """Whether it fails, and what would have been passed on by then."""
    opening, body, passed = Opening(), ChunkedBody(), b""
    for piece in pieces:
        data, boundary = opening.add(piece, body.feed(piece)) if not passed else (piece, 0)
        if not passed and opening.fails(data):
            return True, passed
        passed += b"" if not passed and opening.hold(data, boundary) else data
    return False, passed + opening.add(b"", 0)[0]


@pytest.mark.parametrize("begin", [b"", ROLE])
@pytest.mark.parametrize(
    ("then", "fails"),
    [
        (TOKEN, False),
        (TOKEN + error(500), False),
        (error(500), True),
        (error(429), True),
        (error(400), False),
        (DIED, True),
        (ABORT, True),
        (TEXT + given_up("500"), False),
        (given_up("500"), True),
        (given_up("null"), True),
        (given_up("400"), False),
        (b"", False),
    ],
)
def test_where_the_pieces_end_is_no_matter(begin: bytes, then: bytes, fails: bool) -> None:
    stream = begin + then + DONE
    for cut in range(len(stream)):
        failed, passed = judged([stream[:cut], stream[cut:]])
        assert failed is fails, stream[:cut]
        assert passed == (b"" if fails else stream)


def test_an_event_that_is_long_is_not_waited_for() -> None:
    data = chunk(b"data: " + b"x" * HELD)[:-2]
    assert not Opening().hold(data, 0)


@pytest.mark.parametrize(
    ("stream", "status"),
    [
        (TOKEN, None),
        (TOKEN + error(500), None),
        (ROLE, None),
        (ROLE + TOKEN, None),
        (TEXT, None),
        (error(503), 503),
        (error(400) + DONE, 400),
        (ROLE + error(503), 503),
        (error(7), 500),
        (DIED, 500),
        (ABORT, 500),
        (given_up("503"), 503),
        (given_up("null"), 500),
        (error(503)[:-5], None),
        (named("internal_error"), 500),
        (named("api_error"), 500),
        (named("overloaded_error"), 503),
        (named("invalid_request_error"), None),
        (named("internal_error")[:-5], None),
        (chunk(b'data: {"choices":[{"text":"say \\"error\\": {","finish_reason":null}]}\n\n'), None),
        (chunk(b'data: {"text":"\\"error\\"","error":null}\n\n'), None),
    ],
)
def test_the_status_that_a_stream_amounts_to(stream: bytes, status: int | None) -> None:
    assert error_status(stream) == status
