"""Chunked bodies: framed as a plain reading of RFC 9112 section 7.1 frames them."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable
from typing import NamedTuple

from router.http.chunked import EVENT_ENDS, ChunkedBody, MalformedChunk, decode_chunks
from tests.fuzz.target import Target, pieces
from tests.fuzz.targets.http_messages import WORDS
from tests.router.http.test_chunked import chunk

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_MOST_LINE = 4096
"""Bytes of a line, all but its "\\n"."""


class Framed(NamedTuple):
    """How far a body has come. `boundary`: the end of the last chunk that ends with an event, or of the body. `content`
    and `rest` (what is behind the body): None where it has not ended."""

    chunks: int = 0
    boundary: int = 0
    content: bytes | None = None
    rest: bytes | None = None


def _body(data: bytes) -> Hashable:
    whole, cut, plain = _read([data]), _read(pieces(data)), _read_plainly(data)
    assert whole == cut == plain
    return plain and (min(plain.chunks, 6), plain.boundary > 0, plain.rest and plain.rest[:1])


def _read(parts: list[bytes]) -> Framed | None:
    """None: malformed."""
    body, came, end = ChunkedBody(), b"", 0
    try:
        for part in parts:
            boundary = 0 if body.done else body.feed(part)
            end = len(came) + boundary if boundary else end
            came += part
    except MalformedChunk:
        return None
    assert not body.done or came[end:].startswith(body.excess)
    return Framed(body.chunks, end, decode_chunks(came[:end]), came[end:]) if body.done else Framed(body.chunks, end)


def _read_plainly(data: bytes) -> Framed | None:
    chunks, boundary, content, at = 0, 0, b"", 0
    while (line := _line(data, at)) is not None:
        size = _SIZE.fullmatch(line.removesuffix(b"\r\n").removesuffix(b"\n"))
        if not size or len(line) - 1 > _MOST_LINE:
            return None
        length = int(size[1], 16)
        if not length:
            return _trailers(data, at + len(line), Framed(chunks, boundary, content))
        start = at + len(line)
        chunks, content, at = chunks + 1, content + data[start : start + length], start + length + 2
        ends = at <= len(data) and (content[-4:] + data[at - 2 : at]).endswith(EVENT_ENDS)
        boundary = at if ends else boundary
    return None if len(data) - at > _MOST_LINE else Framed(chunks, boundary)


def _trailers(data: bytes, at: int, found: Framed) -> Framed | None:
    while (line := _line(data, at)) is not None:
        if len(line) - 1 > _MOST_LINE:
            return None
        at += len(line)
        if line in {b"\n", b"\r\n"}:
            return found._replace(boundary=at, rest=data[at:])
    return None if len(data) - at > _MOST_LINE else found._replace(content=None)


def _line(data: bytes, at: int) -> bytes | None:
    """With its end; None while it has none."""
    end = data.find(b"\n", at) + 1
    return data[at:end] if end else None


def _seeds() -> list[bytes]:
    draw = random.Random(3)
    contents = [b"hello", b"data: x\n\n", b"data: y\r\n\r\n", b"x" * 200, b"\n\n", b"0\r\n\r\n", b"a", b"\n", b"\r\n"]
    ends = [b"0\r\n\r\n", b"0\r\n\r\nmore", b"000;x\r\na: b\r\n\r\n", b""]
    extensions = [b""] * 4 + [b";a=b", b" ", b' ; q="\\""']
    return [
        b"".join(chunk(draw.choice(contents), draw.choice(extensions)) for _ in range(draw.randint(0, 6)))
        + draw.choice(ends)
        for _ in range(100)
    ]


TARGETS = (Target("chunks", _body, _seeds, WORDS),)
