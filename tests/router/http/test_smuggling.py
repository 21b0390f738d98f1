"""Bytes that two readers could understand differently are refused, before anything comes of them."""

from __future__ import annotations

import pytest

from tests.router.http.test_front import GET, Site

HOST = b"host: x"


def request(*lines: bytes, start: bytes = b"POST /v1/x HTTP/1.1", end: bytes = b"\r\n", body: bytes = b"") -> bytes:
    return end.join([start, *lines, b"", b""]) + body


ZERO = b"0\r\n\r\n"
LENGTHS = [
    request(HOST, b"content-length: 5", b"content-length: 5", body=b"hello"),
    request(HOST, b"content-length: 5", b"content-length: 6", body=b"hello"),
    request(HOST, b"content-length: 5, 5", body=b"hello"),
    request(HOST, b"content-length: 5", b"transfer-encoding: chunked", body=ZERO),
    request(HOST, b"transfer-encoding: chunked", b"content-length: 5", body=ZERO),
    request(HOST, b"content-length: -1"),
    request(HOST, b"content-length: +5", body=b"hello"),
    request(HOST, b"content-length: 0x5", body=b"hello"),
    request(HOST, b"content-length: 1 0", body=b"hello"),
    request(HOST, b"content-length:", body=b"hello"),
    request(HOST, b"content-length : 5", body=b"hello"),
]
CODINGS = [
    request(HOST, b"transfer-encoding: chunked", b"transfer-encoding: chunked", body=ZERO),
    request(HOST, b"transfer-encoding: chunked, identity", body=ZERO),
    request(HOST, b"transfer-encoding: identity", body=ZERO),
    request(HOST, b"transfer-encoding: xchunked", body=ZERO),
    request(HOST, b"transfer-encoding: \x0bchunked", body=ZERO),
    request(HOST, b"transfer-encoding : chunked", body=ZERO),
    request(HOST, b"transfer-encoding:", b" chunked", body=ZERO),
    request(b"transfer-encoding: chunked", start=b"POST /v1/x HTTP/1.0", body=ZERO),
]
CHUNKS = [b"0x5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n", b"5\nhello\n0\n\n"]
CHUNKS += [b"10000000000000005\r\nhello\r\n0\r\n\r\n", b"5\r\nhelloXX\r\n0\r\n\r\n", b"-5\r\nhello\r\n0\r\n\r\n"]
IN_CHUNKS = [request(HOST, b"transfer-encoding: chunked", body=body) for body in CHUNKS]
LINES = [
    request(HOST, b"x-a: b", b" c", b"content-length: 0"),
    request(HOST, b"x-a: b", b"\tc", b"content-length: 0"),
    request(b" " + HOST, start=b"GET /v1/x HTTP/1.1"),
    request(HOST, b"content-length: 0", end=b"\n"),
    b"POST /v1/x HTTP/1.1\r\nhost: x\ncontent-length: 0\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nhost: x\rcontent-length: 0\r\n\r\n",
    request(HOST, b"x-a: b\rc: d", b"content-length: 0"),
    request(HOST, b"x-a: a\0b", b"content-length: 0"),
    request(HOST, b"x-a: a\x01b", b"content-length: 0"),
    request(HOST, b"x\0a: b", b"content-length: 0"),
    request(HOST, b"x(a): b", b"content-length: 0"),
    request(HOST, b": b", b"content-length: 0"),
]
STARTS = [b"GET /v1/\0x HTTP/1.1", b"GET /v1/x y HTTP/1.1", b"GET /v1/x\ty HTTP/1.1", b"GET v1/x HTTP/1.1"]
STARTS += [b"GET /v1/\xff HTTP/1.1", b"GET /v1/x HTTP/1.2", b"GET /v1/x HTTP/2.0", b"GET /v1/x HTTP/0.9", b"GET /v1/x"]
STARTING = [request(HOST, start=start) for start in STARTS]
HOSTS = [request(start=b"GET /v1/x HTTP/1.1"), request(HOST, HOST, start=b"GET /v1/x HTTP/1.1")]


@pytest.mark.parametrize("message", LENGTHS + CODINGS + IN_CHUNKS + LINES + STARTING + HOSTS)
def test_what_may_be_read_in_two_ways_is_refused(message: bytes) -> None:
    site = Site()
    site.feed(message + GET)
    assert site.requests == []
    assert site.transport.status in {400, 501}
    assert site.connection.closing


@pytest.mark.parametrize("message", LENGTHS + CODINGS + IN_CHUNKS + LINES + STARTING + HOSTS)
def test_nor_is_it_read_behind_a_request_that_is_well(message: bytes) -> None:
    """Whose head is remembered."""
    good = request(HOST, b"content-length: 5", body=b"hello")
    site = Site()
    site.feed(good)
    site.feed(good + message + GET)
    assert [got.body for got in site.requests] == [b"hello", b"hello"]


def test_a_trailer_is_no_header() -> None:
    """It comes when all that looks at headers has looked."""
    trailer = b"0\r\nauthorization: Bearer x\r\nx-router-target-worker: a\r\naccept: a/b\r\n\r\n"
    site = Site()
    site.feed(request(HOST, b"transfer-encoding: chunked", body=b"5\r\nhello\r\n" + trailer))
    (got,) = site.requests
    assert got.body == b"hello"
    assert [name for name, _ in got.head.headers] == [b"host", b"transfer-encoding"]
    assert (got.head.target_worker, got.head.passed_on) == (None, b"")


def test_what_passes_on_is_whole_lines() -> None:
    site = Site()
    site.feed(request(HOST, b"accept: a/b", b"user-agent:  c", b"content-length: 0"))
    assert site.requests[0].head.passed_on == b"accept: a/b\r\nuser-agent: c\r\n"


def test_blanks_around_a_value_are_no_part_of_it() -> None:
    """RFC 9110 section 5.5: else a key with a blank behind it would be another key."""
    site = Site()
    site.feed(
        request(HOST, b"x-api-key: \tkey \t", b"x-router-target-worker: a ", b"accept: a/b  ", b"content-length: 0")
    )
    head = site.requests[0].head
    assert (b"x-api-key", b"key") in head.headers
    assert (head.target_worker, head.passed_on) == (b"a", b"accept: a/b\r\n")
