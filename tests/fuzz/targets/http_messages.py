"""Requests and answers as HTTP/1.1 has them, well and badly formed, for the targets that read them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.router.http.test_chunked import chunk

_LAST = b"0\r\n\r\n"
_SWITCHING = b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
WORDS = (
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\t", b":", b": ", b"\x00", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0",
    b"GET ", b"POST ", b"HEAD ", b"OPTIONS * ", b"CONNECT a:1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length:1001\r\n", b"Content-Length : 5\r\n",
    b"Content-Length: 5, 5\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length:\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"transfer-encoding:\x0bchunked\r\n",
    b"Connection: close\r\n", b"Connection: keep-alive, content-length\r\n", b"Expect: 100-continue\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"X-Router-Priority: 1\r\n", b"X-Request-Id: 7\r\n",
    b"X: a\r\n b\r\n", _SWITCHING, b"Trailer: x\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No Content\r\n", b"Content-Type: text/event-stream\r\n",
    b"data: {}\n\n", b"data: [DONE]\n\n", b"0\r\n\r\n", b"5;a=b\r\nhello\r\n", b"ffffffffffffffff\r\n",
    b"00000005\r\nhello\r\n", b"0\r\nexpires: never\r\n\r\n", b"-1\r\n", b"A\n",
)  # fmt: skip


def requests() -> list[bytes]:
    """Some hundred, up to four of them on one connection."""
    draw = random.Random(1)
    return [b"".join(_request(draw) for _ in range(draw.randint(1, 4))) for _ in range(300)]


def repeating() -> list[bytes]:
    """A client that repeats its head, but for the length, and then changes something of it."""
    draw = random.Random(5)
    return [b"".join(_repeated(draw)) for _ in range(200)]


def answers() -> list[bytes]:
    draw = random.Random(2)
    return [_answer(draw) for _ in range(300)]


def _request(draw: random.Random) -> bytes:
    method = draw.choice([b"POST", b"POST", b"POST", b"GET", b"HEAD", b"DELETE"])
    target = draw.choice([b"/v1/completions", b"/v1/chat/completions?a=b", b"/", b"*", b"http://x/v1/models"])
    version = draw.choice([b"HTTP/1.1"] * 6 + [b"HTTP/1.0"])
    headers = [b"Host: x", *draw.sample(_HEADERS, draw.randint(0, 3))]
    body = b""
    if method == b"POST":
        framing, body = _framed(draw, draw.choice([b"", b"hello", b'{"prompt": "x"}', b"x" * 300, b"y" * 1001]))
        headers.insert(draw.randint(0, len(headers)), framing)
    return b"%s %s %s\r\n%s\r\n\r\n%s" % (method, target, version, b"\r\n".join(headers), body)


def _repeated(draw: random.Random) -> Iterator[bytes]:
    lines = [b"POST /v1/x HTTP/1.1", b"Host: x", b"Content-Length: %d", *draw.sample(_HEADERS, draw.randint(0, 2))]
    for _ in range(draw.randint(2, 4)):
        if draw.random() < 0.4:
            at = draw.randrange(len(lines))
            change = draw.choice([b"X-More: 1", b"POST /v1/x HTTP/1.0", b"Connection: keep-alive", *_HEADERS])
            lines = [*lines[:at], change, *lines[at + draw.randint(0, 1) :]]
        body = draw.choice([b"", b"hello", b"x" * 50, b"POST / HTTP/1.1"])
        head = b"\r\n".join(line % len(body) if b"%d" in line else line for line in lines)
        yield head + b"\r\n\r\n" + body


def _framed(draw: random.Random, body: bytes) -> tuple[bytes, bytes]:
    if draw.random() < 0.7:
        return draw.choice([b"Content-Length: %d", b"content-length:%d", b"content-length: %d "]) % len(body), body
    cut = draw.randint(0, len(body))
    return b"Transfer-Encoding: chunked", b"".join(map(chunk, filter(None, (body[:cut], body[cut:])))) + _LAST


def _answer(draw: random.Random) -> bytes:
    interim = draw.choice(
        [b""] * 4 + [_SWITCHING, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: </a>\r\n\r\n"]
    )
    status = draw.choice([b"HTTP/1.1 200 OK"] * 5 + [b"HTTP/1.1 503 No", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 None"])
    headers = [b"date: today", *draw.sample(_ANSWER_HEADERS, draw.randint(0, 2))]
    events = [draw.choice(_EVENTS) for _ in range(draw.randint(0, 6))]
    body = b"".join(events)
    match draw.choice(["sized", "chunked", "chunked", "chunked", "close"]):
        case "sized":
            headers.append(b"content-length: %d" % len(body))
        case "chunked":
            headers += [b"transfer-encoding: chunked", b"content-type: text/event-stream"]
            body = b"".join(map(chunk, events)) + draw.choice([_LAST, _LAST, b"0\r\na: b\r\n\r\n", b""])
    draw.shuffle(headers)
    return interim + status + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body


_HEADERS = (
    b"Accept: */*", b"X-Request-Id: 7", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue",
    b"Connection: upgrade\r\nUpgrade: h2c", b"X-Router-TTFT-SLO: 0.5", b"Authorization: Bearer x",
    b"X: " + b"y" * 300,
)  # fmt: skip
_ANSWER_HEADERS = (b"connection: close", b"x-own: 5", b"content-type: application/json", b"connection: x-own, y")
_EVENTS = (
    b"data: {}\n\n", b"data: x\r\n\r\n", b": comment\n\n", b"data: cut", b"\n\n", b"data: [DONE]\n\n",
    b"data: long" + b"x" * 300 + b"\n\n",
    b'data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}\n\n',
)  # fmt: skip
