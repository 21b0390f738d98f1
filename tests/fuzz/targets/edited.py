"""Answers of which a number is changed on the way, and the usage that is read from their end."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable

from router.http.chunked import ChunkedBody, MalformedChunk, decode_chunks
from router.http.edited import EditedBody, EditedEvents
from router.http.relay import HELD
from router.proxy.usage import CACHED, read_usage, with_cached
from tests.engines.recordings import RECORDINGS, exchanges
from tests.fuzz.target import JSON, Target, coin, pieces
from tests.router.http.test_chunked import chunk
from tests.router.http.test_edited import MADE, PLAIN, TOLD, edit, head

_LAST = b"0\r\n\r\n"
_GONE = b"data: gone\n\n"


def _events(data: bytes) -> Hashable:
    """A body of any chunks, cut anywhere: the content is edited, and nothing else of it."""
    return _edited_as_it_comes(data, HELD)


def _long_events(data: bytes) -> Hashable:
    """The same, of events that are too long to be held back."""
    return _edited_as_it_comes(data, 40)


def _edited_as_it_comes(data: bytes, held_limit: int) -> Hashable:
    relay, body, sent, came = EditedEvents(CACHED, edit, held_limit), ChunkedBody(), b"", b""
    try:
        for piece in pieces(data):
            boundary = body.feed(piece)
            of_body = piece[:boundary] if body.done else piece
            came += of_body
            sent += relay.body(of_body, boundary)
            if body.done:
                break
    except MalformedChunk:
        return "malformed"
    if not body.done:
        last = relay.broken(_GONE)
        assert last is None or decode_chunks(sent + last).endswith(_GONE)
        return "broken", last is None
    sent += relay.end()
    before, after = decode_chunks(came), decode_chunks(sent)
    # What is passed on in pieces is not edited.
    assert after == edit(before) if len(data) < held_limit else edit(after) == edit(before)
    return min(before.count(CACHED), 3), sent == came, min(body.chunks, 5)


def _whole(data: bytes) -> Hashable:
    """A body in one piece."""
    chunked = coin(data)
    came = chunk(data[:10]) + chunk(data[10:]) + _LAST if chunked and len(data) > 10 else data
    relay = EditedBody(head("chunked" if came is not data else "sized"), edit)
    assert not any(relay.body(piece, 0) for piece in pieces(came))
    sent = relay.end()
    assert sent == edit(data)
    assert relay.framing == b"content-length: %d\r\n" % len(sent)
    return sent == data


def _usage(data: bytes) -> Hashable:
    """Any two pieces; what is read is what was written, by whoever wrote it last."""
    parts = pieces(data)
    recent, latest = b"".join(parts[:-1]), b"".join(parts[-1:])
    prompt, cached = read_usage(recent, latest)
    assert cached is None or prompt is not None
    assert all(number is None or 0 <= number < 10**15 for number in (prompt, cached))
    if _is_json(data):
        assert _is_json(with_cached(data, 7))
    return prompt is None, cached is None


def _is_json(data: bytes) -> bool:
    try:
        JSON.decode(data)
    except (ValueError, RecursionError):
        return False
    return True


def _streams() -> list[bytes]:
    draw = random.Random(4)
    kinds = [TOLD % b"5", TOLD % b"null", TOLD % b"0", MADE, *PLAIN]
    streams = [b"".join(draw.choice(kinds) for _ in range(draw.randint(0, 6))) for _ in range(100)]
    return [b"".join(map(chunk, filter(None, _cut(draw, stream)))) + draw.choice([_LAST, b""]) for stream in streams]


def _cut(draw: random.Random, stream: bytes) -> list[bytes]:
    if draw.random() < 0.5:
        return [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    at = draw.randint(0, len(stream))
    return [stream[:at], stream[at:]]


def _answers() -> list[bytes]:
    """Recorded ones, streams included."""
    bodies = [each["response"]["body"] for recording in RECORDINGS for each in exchanges(recording.name)]
    return [body.encode() for body in map(_text, bodies) if "usage" in body]


def _text(body: object) -> str:
    return body if isinstance(body, str) else json.dumps(body)


_WORDS = (
    b'"usage":', b'"usage"', b'"prompt_tokens":', b'"cached_tokens":', b'"cached_tokens": null', CACHED, b"null",
    b"{", b"}", b'\\"', b"\n\n", b"data: ", b"9" * 4400, b" " * 50, b"0\r\n\r\n", b"\r\n", b"5\r\nhello\r\n",
)  # fmt: skip

TARGETS = (
    Target("edited-events", _events, _streams, _WORDS),
    Target("edited-long-events", _long_events, _streams, _WORDS, share=50),
    Target("edited-body", _whole, _answers, _WORDS),
    Target("usage", _usage, _answers, _WORDS),
)
