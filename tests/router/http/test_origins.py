"""What browsers are told about pages of other origins."""

from __future__ import annotations

import pytest

from router.http.messages import Headers, Response
from router.http.origins import Origins

PAGE = "https://chat.example.com"
FROM_PAGE: Headers = [(b"host", b"r"), (b"origin", PAGE.encode())]
ASKS: Headers = [*FROM_PAGE, (b"access-control-request-method", b"POST")]
NAMED: Headers = [*ASKS, (b"access-control-request-headers", b"authorization,content-type")]


def told(response: Response) -> dict[bytes, bytes]:
    return dict(response.headers)


def test_an_allowed_page_may_read_answers_and_caches_tell_pages_apart() -> None:
    lines = Origins([PAGE, "http://localhost:3000"]).answer_lines(FROM_PAGE)
    assert b"access-control-allow-origin: https://chat.example.com\r\n" in lines
    assert b"vary: origin\r\n" in lines


def test_all_may_where_all_are_allowed() -> None:
    lines = Origins([PAGE, "*"]).answer_lines(FROM_PAGE)
    assert b"access-control-allow-origin: *\r\n" in lines
    assert b"vary" not in lines


@pytest.mark.parametrize("origin", [b"https://chat.example.com:8443", b"http://chat.example.com", b"null", b"", b"*"])
def test_no_other_page_may(origin: bytes) -> None:
    origins, headers = Origins([PAGE]), [(b"origin", origin), ASKS[-1]]
    assert origins.answer_lines(headers) == b""
    assert not origins.is_preflight(b"OPTIONS", headers)
    assert origins.labelled(Response(200), headers) == Response(200)


def test_what_comes_from_no_page_is_told_nothing() -> None:
    assert Origins(["*"]).answer_lines([(b"host", b"r")]) == b""


def test_a_preflight_is_told_what_it_asks_for() -> None:
    assert Origins([PAGE]).is_preflight(b"OPTIONS", NAMED)
    answer = Origins([PAGE]).preflight(NAMED)
    assert told(answer)[b"access-control-allow-headers"] == b"authorization,content-type"
    assert b"POST" in told(answer)[b"access-control-allow-methods"].split(b", ")
    assert b"access-control-allow-headers" not in told(Origins([PAGE]).preflight(ASKS))


def test_only_a_question_is_one() -> None:
    assert not Origins([PAGE]).is_preflight(b"POST", NAMED)
    assert not Origins([PAGE]).is_preflight(b"OPTIONS", FROM_PAGE)
