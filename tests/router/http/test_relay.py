"""What the client gets of a worker's body, cut in any way, whole or broken off."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.chunked import ChunkedBody, decode_chunks
from router.http.relay import AsIs, Events, Rechunked, Relay, Unchunked, relay_for
from router.http.upstream import Framing, Head
from tests.router.http.test_chunked import chunk, pieces_of

ERROR = b'data: {"error":"gone"}\n\n'


def relayed(relay: Relay, pieces: list[bytes]) -> bytes:
    body = ChunkedBody()
    return b"".join(relay.body(piece, body.feed(piece)) for piece in pieces)


events = st.lists(
    st.binary(min_size=1, max_size=30).map(lambda b: b"data: " + b.replace(b"\n", b"") + b"\n\n"), max_size=6
)
cuts = st.lists(st.integers(0, 300), max_size=10)


@given(events, cuts)
def test_a_whole_stream_passes_byte_for_byte(stream: list[bytes], where: list[int]) -> None:
    whole = b"".join(map(chunk, stream)) + b"0\r\n\r\n"
    relay = Events()
    assert relayed(relay, pieces_of(whole, where)) + relay.end() == whole


@given(events, cuts, st.integers(0, 300))
def test_a_broken_stream_ends_behind_a_whole_event_and_with_the_error(
    stream: list[bytes], where: list[int], broken_at: int
) -> None:
    whole = b"".join(map(chunk, stream))
    relay = Events()
    sent = relayed(relay, pieces_of(whole[:broken_at], where))
    last = relay.broken(ERROR)
    assert last is not None
    content = decode_chunks(sent + last)
    assert content.endswith(ERROR)
    passed = content.removesuffix(ERROR)
    assert passed in [b"".join(stream[:n]) for n in range(len(stream) + 1)]


@given(events, cuts)
def test_no_event_is_held_back_once_it_is_whole(stream: list[bytes], where: list[int]) -> None:
    whole = b"".join(map(chunk, stream))
    assert relayed(Events(), pieces_of(whole, where)) == whole


def test_an_event_in_several_chunks_is_held_until_it_is_whole() -> None:
    relay, body = Events(), ChunkedBody()
    first, second = chunk(b"data: a\n\n") + chunk(b"data: {"), chunk(b"}\n\n")
    assert relay.body(first, body.feed(first)) == chunk(b"data: a\n\n")
    assert relay.body(second, body.feed(second)) == chunk(b"data: {") + second


def test_an_event_too_long_to_hold_passes_in_pieces_and_cannot_be_ended_properly() -> None:
    relay, body = Events(), ChunkedBody()
    data = b"%x\r\n" % 200_000 + b"x" * 100_000
    assert relay.body(data, body.feed(data)) == data
    assert relay.broken(ERROR) is None
    assert not relay.clean
    rest = b"x" * 99_998 + b"\n\n\r\n"
    assert relay.body(rest, body.feed(rest)) == rest
    assert relay.broken(ERROR) is not None
    assert relay.clean


def test_other_bodies_pass_as_they_are_and_have_no_honest_end() -> None:
    relay = AsIs()
    assert (relay.body(b"abc", 0), relay.end(), relay.broken(ERROR)) == (b"abc", b"", None)


def test_a_body_that_ends_with_its_connection_gets_chunks() -> None:
    relay = Rechunked(events=True)
    sent = relay.body(b"data: 1\n\n", 0) + relay.body(b"data: 2\n\n", 0) + relay.end()
    assert decode_chunks(sent) == b"data: 1\n\ndata: 2\n\n"
    assert relay.broken(ERROR) is not None
    relay.body(b"data: 3", 0)
    assert relay.broken(ERROR) is None


def test_http_1_0_gets_the_content_without_chunks() -> None:
    relay = relay_for(Head(200, "chunked", False, True, b""), http_1_0=True)
    stream = chunk(b"hello ") + chunk(b"world") + b"0\r\n\r\n"
    assert [relay.body(piece, 0) for piece in pieces_of(stream, [3, 9])] == [b"", b"", b""]
    assert relay.end() == b"hello world"
    assert relay.broken(ERROR) is None
    assert not Unchunked(None).is_done(stream)


def test_http_1_0_gets_events_as_they_come() -> None:
    relay, body = Unchunked(Events(sys.maxsize)), ChunkedBody()
    stream = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    sent = [relay.body(piece, body.feed(piece)) for piece in pieces_of(stream, [20, 25])]
    assert sent == [b"data: 1\n\n", b"", b"data: 2\n\n"]
    assert relay.broken(ERROR) == ERROR
    assert relay.end() == b""
    relay = Unchunked(Events(sys.maxsize))
    assert relay.body(chunk(b"data: 3\n") + b"0\r\n\r\n", 0) == b""
    assert relay.end() == b"data: 3\n"


@pytest.mark.parametrize(
    ("framing", "events", "http_1_0", "kind", "told", "until_close"),
    [
        ("chunked", True, False, Events, b"transfer-encoding: chunked\r\n", False),
        ("chunked", False, False, AsIs, b"transfer-encoding: chunked\r\n", False),
        ("sized", False, False, AsIs, b"", False),
        ("sized", True, False, AsIs, b"", False),
        ("empty", False, False, AsIs, b"", False),
        ("close", False, False, Rechunked, b"transfer-encoding: chunked\r\n", False),
        ("close", True, False, Rechunked, b"transfer-encoding: chunked\r\n", False),
        ("chunked", True, True, Unchunked, b"", True),
        ("close", False, True, AsIs, b"", True),
        ("sized", False, True, AsIs, b"", False),
        ("empty", False, True, AsIs, b"", False),
    ],
)
def test_which_way(framing: Framing, events: bool, http_1_0: bool, kind: type, told: bytes, until_close: bool) -> None:
    relay = relay_for(Head(200, framing, events, True, b""), http_1_0)
    assert (type(relay), relay.framing, relay.until_close) == (kind, told, until_close)


def test_answers_that_break_off_at_the_same_time_do_not_share_what_was_held() -> None:
    head = Head(200, "chunked", True, True, b"")
    one, other = relay_for(head, False), relay_for(head, False)
    assert one.body(b"6\r\ndata: ", 0) == b""
    assert other.end() == b""
    assert (one.clean, other.clean) == (False, True)
