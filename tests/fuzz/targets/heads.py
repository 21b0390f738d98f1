"""Heads that come again are not parsed again, and mean what they would."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Hashable

import httptools

from router.http.upstream import Head, KnownHeads, parse_head
from tests.fuzz.target import Target, coin, pieces
from tests.fuzz.targets.http_messages import WORDS, answers, repeating
from tests.router.http.test_repeated import Pair


def _requests(data: bytes) -> Hashable:
    """One connection remembers heads, another never does; requests often come in a piece of their own."""
    pair = Pair(slow=coin(data))
    for piece in _apart(data) if coin(data, 1) else pieces(data):
        pair.feed(piece)
    pair.check()
    site = pair.sites[0]
    reader = site.connection._reader
    return len(site.requests), reader._repeated is None, reader._misses, site.transport.closed


def _apart(data: bytes) -> list[bytes]:
    """Cut where requests seem to begin, or a little before or after."""
    draw = random.Random(zlib.crc32(data))
    starts = [at for at in range(1, len(data)) if data[at : at + 5] in {b"POST ", b"GET /"}]
    cuts = {at + draw.choice((0, 0, 0, -3, 30)) for at in starts} | {int(draw.random() * len(data))}
    return [data[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(data)]) if end > start]


def _answers(data: bytes) -> Hashable:
    """The heads in `data`, one after the other and again, read with and without a memory."""
    known, found = KnownHeads(), None
    heads = [part + b"\r\n\r\n" for part in data.split(b"\r\n\r\n")[:4]]
    for raw in (*heads, *heads):
        found = _outcome(known, raw)
        assert found == _outcome(None, raw)
    return found[0][:4] if isinstance(found, tuple) else found


def _outcome(known: KnownHeads | None, raw: bytes) -> tuple[Head, int | None] | str:
    try:
        return known.read(raw, head_only=False) if known else parse_head(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        return type(error).__name__


TARGETS = (
    Target("request-heads", _requests, repeating, WORDS),
    Target("answer-heads", _answers, answers, WORDS),
)
