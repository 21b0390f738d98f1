"""Answers of which a number is changed on the way: whatever the pieces they come in, and nothing else of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.chunked import ChunkedBody, decode_chunks
from router.http.edited import EditedBody, EditedEvents
from router.http.upstream import Framing, Head
from router.proxy.usage import CACHED, with_cached
from tests.router.http.test_chunked import chunk, pieces_of

LAST = b"0\r\n\r\n"
TOLD = b'data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":%s}}}\n\n'
MADE = b'data: {"text":"\\"cached_tokens\\":5, cached_tokens: 5"}\n\n'
"""What a model has written: its quotes are escaped."""


def edit(answer: bytes) -> bytes:
    return with_cached(answer, 123_456)


def relayed(pieces: list[bytes]) -> bytes:
    relay, body = EditedEvents(CACHED, edit), ChunkedBody()
    return b"".join(relay.body(piece, body.feed(piece)) for piece in pieces) + relay.end()


PLAIN = [b"data: {}\n\n", b": comment\n\n", b"data: [DONE]\n\n"]
events = st.lists(st.sampled_from([TOLD % b"5", TOLD % b"null", TOLD % b"0", MADE, *PLAIN]), max_size=8)
cuts = st.lists(st.integers(0, 900), max_size=12)


@given(events, cuts)
def test_a_stream_cut_anywhere(stream: list[bytes], where: list[int]) -> None:
    came = b"".join(map(chunk, stream)) + LAST
    sent = relayed(pieces_of(came, where))
    assert sent.endswith(LAST)
    assert decode_chunks(sent) == edit(b"".join(stream))


@given(events, cuts, st.lists(st.integers(0, 600), max_size=6))
def test_chunks_that_end_anywhere(stream: list[bytes], where: list[int], ends: list[int]) -> None:
    """Something between may cut chunks anew."""
    chunks = [chunk(piece) for piece in pieces_of(b"".join(stream), ends) if piece]
    sent = relayed(pieces_of(b"".join(chunks) + LAST, where))
    assert decode_chunks(sent) == edit(b"".join(stream))


@given(events, st.integers(0, 900), cuts)
def test_a_stream_that_breaks_ends_behind_a_whole_event(stream: list[bytes], broken_at: int, where: list[int]) -> None:
    error = b'data: {"error":"gone"}\n\n'
    relay, body = EditedEvents(CACHED, edit), ChunkedBody()
    came = b"".join(map(chunk, stream))[:broken_at]
    sent = b"".join(relay.body(piece, body.feed(piece)) for piece in pieces_of(came, where))
    last = relay.broken(error)
    assert last is not None
    passed = decode_chunks(sent + last).removesuffix(error)
    assert passed in [edit(b"".join(stream[:count])) for count in range(len(stream) + 1)]


@pytest.mark.parametrize("end", range(1, len(TOLD)))
def test_chunks_that_end_in_the_middle_of_the_word(end: int) -> None:
    event = TOLD % b"5"
    sent = relayed([chunk(event[:end]) + chunk(event[end:]) + LAST])
    assert decode_chunks(sent) == edit(event)


def test_what_is_not_to_be_changed_comes_as_it_came() -> None:
    odd = b"00A;x=y\r\ndata: {}\n\n\r\n"
    assert relayed([odd, LAST]) == odd + LAST


def test_a_long_event_in_pieces_is_passed_on() -> None:
    content = b"data: " + b"x" * 300_000 + b"\n\n"
    sent = relayed([*pieces_of(chunk(content), [70_000, 150_000, 299_000]), chunk(TOLD % b"5") + LAST])
    assert decode_chunks(sent) == content + edit(TOLD % b"5")


def head(framing: Framing) -> Head:
    return Head(200, framing, events=False, keep_alive=True, passed_on=b"")


ANSWERS: list[dict[str, Any]] = [
    {"usage": {"prompt_tokens_details": {"cached_tokens": 7}}},
    {"usage": {"prompt_tokens_details": {"cached_tokens": None}}},
    {"usage": {"prompt_tokens_details": None}},
    {"choices": [{"text": '"cached_tokens":7 \u00e9'}], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}},
]


@pytest.mark.parametrize("framing", ["sized", "chunked"])
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
@settings(max_examples=10)
@given(cuts)
def test_a_whole_body(answer: dict[str, Any], spaced: bool, framing: Framing, where: list[int]) -> None:
    body = json.dumps(answer, separators=None if spaced else (",", ":")).encode()
    came = chunk(body[:10]) + chunk(body[10:]) + LAST if framing == "chunked" else body
    relay = EditedBody(head(framing), edit)
    assert b"".join(relay.body(piece, 0) for piece in pieces_of(came, where)) == b""
    sent = relay.end()
    assert relay.framing == b"content-length: %d\r\n" % len(sent)
    told = json.loads(sent)
    details = told["usage"]["prompt_tokens_details"]
    assert details == ({"cached_tokens": 123_456} if answer["usage"] != ANSWERS[2]["usage"] else None)
    assert told.get("choices") == answer.get("choices")
    assert relay.broken(b"") is None
