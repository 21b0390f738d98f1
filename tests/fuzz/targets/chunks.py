"""Chunked bodies: framed as a plain reading of RFC 9112 section 7.1 frames them."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable
from typing import NamedTuple

from router.http.chunked import ChunkedBody, MalformedChunk, decode_chunks
from tests.fuzz.target import Target, pieces
from tests.fuzz.targets.http_messages import WORDS
from tests.router.http.test_chunked import chunk

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_MOST_LINE = 4096


class Framed(NamedTuple):
    """`rest`: what is behind the body's end; None: it has not ended."""

    chunks: int
    content: bytes
    rest: bytes | None


def _body(data: bytes) -> Hashable:
    whole, cut, plain = _read([data]), _read(pieces(data)), _read_plainly(data)
    assert whole == cut == plain
    if isinstance(plain, Framed) and plain.rest is not None:
        assert decode_chunks(data[: len(data) - len(plain.rest)]) == plain.content
    return (min(plain.chunks, 6), plain.rest and plain.rest[:1]) if isinstance(plain, Framed) else plain


def _read(parts: list[bytes]) -> Framed | str:
    body, came, end = ChunkedBody(), b"", 0
    try:
        for part in parts:
            if body.done:
                body.excess += part
                continue
            boundary = body.feed(part)
            assert 0 <= boundary <= len(part)
            end = len(came) + boundary if boundary else end
            came += part
    except MalformedChunk:
        return "malformed"
    content = decode_chunks(came[:end]) if body.done else _content(came)
    return Framed(body.chunks, content, body.excess if body.done else None)


def _content(came: bytes) -> bytes:
    plain = _read_plainly(came)
    assert isinstance(plain, Framed)
    return plain.content


def _read_plainly(data: bytes) -> Framed | str:
    chunks, content, at = 0, b"", 0
    while True:
        line, at, whole = _line(data, at)
        if len(line) > _MOST_LINE:
            return "malformed"
        if not whole:
            return Framed(chunks, content, None)
        size = _SIZE.fullmatch(line.removesuffix(b"\r"))
        if not size:
            return "malformed"
        length = int(size[1], 16)
        if not length:
            return _trailers(data, at, chunks, content)
        chunks += 1
        content += data[at : at + length]
        at += length + 2
        if at >= len(data):
            return Framed(chunks, content, None)


def _trailers(data: bytes, at: int, chunks: int, content: bytes) -> Framed | str:
    while True:
        line, at, whole = _line(data, at)
        if len(line) > _MOST_LINE:
            return "malformed"
        if not whole:
            return Framed(chunks, content, None)
        if not line.removesuffix(b"\r"):
            return Framed(chunks, content, data[at:])


def _line(data: bytes, at: int) -> tuple[bytes, int, bool]:
    end = data.find(b"\n", at)
    return (data[at:], len(data), False) if end < 0 else (data[at:end], end + 1, True)


def _seeds() -> list[bytes]:
    draw = random.Random(3)
    contents = [b"hello", b"data: x\n\n", b"data: y\r\n\r\n", b"x" * 200, b"\n\n", b"0\r\n\r\n", b"a"]
    ends = [b"0\r\n\r\n", b"0\r\n\r\nmore", b"000;x\r\na: b\r\n\r\n", b""]
    extensions = [b""] * 4 + [b";a=b", b" ", b' ; q="\\""']
    return [
        b"".join(chunk(draw.choice(contents), draw.choice(extensions)) for _ in range(draw.randint(0, 6)))
        + draw.choice(ends)
        for _ in range(100)
    ]


TARGETS = (Target("chunks", _body, _seeds, WORDS),)
