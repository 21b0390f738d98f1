import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.chunked import ChunkedBody, MalformedChunk, decode_chunks

EVENT = b"data: x\n\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


contents = st.lists(st.one_of(st.binary(min_size=1, max_size=20), st.just(EVENT)), max_size=6)


@given(contents, st.lists(st.integers(0, 200), max_size=8), st.binary(max_size=5))
def test_however_it_is_cut_the_body_ends_where_it_ends(parts: list[bytes], cuts: list[int], garbage: bytes) -> None:
    whole = b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    body = ChunkedBody()
    for piece in pieces_of(whole, cuts):
        assert not body.done
        body.feed(piece)
    assert body.done
    assert body.chunks == len(parts)
    assert decode_chunks(whole) == b"".join(parts)

    body = ChunkedBody()
    assert body.feed(whole + garbage) == len(whole)
    assert (body.done, body.excess) == (True, garbage)


@given(contents, st.lists(st.integers(0, 200), max_size=8))
def test_boundaries_lie_behind_whole_events(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(chunk, parts))
    body, seen = ChunkedBody(), b""
    ends = {
        len(b"".join(map(chunk, parts[: i + 1])))
        for i, part in enumerate(parts)
        if part.endswith((b"\n\n", b"\r\n\r\n"))
    }
    for piece in pieces_of(stream, cuts):
        boundary = body.feed(piece)
        assert not boundary or len(seen) + boundary in ends
        seen += piece
    fed_at_once = ChunkedBody().feed(stream)
    assert fed_at_once == max(ends, default=0)


@pytest.mark.parametrize(
    "text",
    [b"xyz\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\n", b"1_0\r\n", b"\r\n", b" 5\r\n", b"f" * 16 + b"\r\n", b"5" * 5000],
)
def test_what_is_no_chunk_size(text: bytes) -> None:
    with pytest.raises(MalformedChunk):
        ChunkedBody().feed(text)


def test_extensions_and_trailers_are_part_of_the_body() -> None:
    body = ChunkedBody()
    stream = chunk(b"hello", b";name=value") + b"0\r\nexpires: never\r\n\r\n"
    assert body.feed(stream) == len(stream)
    assert body.done


def test_events_may_end_with_carriage_returns() -> None:
    stream = chunk(b"data: x\r\n\r\n")
    assert ChunkedBody().feed(stream) == len(stream)
