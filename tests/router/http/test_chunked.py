import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.chunked import EVENT_ENDS, SIZE_LINES, USUAL, ChunkedBody, MalformedChunk, decode_chunks

EVENT = b"data: x\n\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


ends_of_lines = st.sampled_from([b"data: x\n", b"\n", b"\r", b"\r\n", b"\n\r\n"])
contents = st.lists(st.one_of(st.binary(min_size=1, max_size=20), st.just(EVENT), ends_of_lines), max_size=6)


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
        for i in range(len(parts))
        if b"".join(parts[: i + 1]).endswith((b"\n\n", b"\r\n\r\n"))
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


# -- whole chunks at once are told apart as byte by byte


class Told:
    """What a body told of its pieces, positions counted from its beginning."""

    def __init__(self, pieces: list[bytes]) -> None:
        body = ChunkedBody()
        self.boundaries: list[int] = []
        self.malformed, fed = False, 0
        try:
            for piece in pieces:
                if body.done:
                    body.excess += piece
                    continue
                boundary = body.feed(piece)
                self.boundaries += [fed + boundary] if boundary else []
                fed += len(piece)
        except MalformedChunk:
            self.malformed = True
        self.chunks, self.done, self.excess = body.chunks, body.done, body.excess
        self.at_start = body.at_start and not body.done

    def __eq__(self, other: object) -> bool:
        """But for boundaries before the last, which depend on where pieces end."""
        if not isinstance(other, Told) or self.malformed or other.malformed:
            return isinstance(other, Told) and self.malformed == other.malformed
        one, two = ({**vars(told), "boundaries": told.boundaries[-1:]} for told in (self, other))
        return one == two

    __hash__ = None  # type: ignore[assignment] # compared only

    def __repr__(self) -> str:
        return f"<Told {vars(self)}>"


def byte_by_byte(stream: bytes) -> list[bytes]:
    return [stream[n : n + 1] for n in range(len(stream))]


sizes = st.sampled_from(
    [
        "{:x}",
        "{:X}",
        "0{:x}",
        "{:015x}",
        "{:x};name=value",
        '{:x};q="a b"',
        "{:x} ",
        "{:x}\t;x",
        "+{:x}",
        "-{:x}",
        " {:x}",
        "{:x}_0",
        "{:x}h",
        "{:x}g",
        "",
        "{:017x}",
    ]
)
pieces_of_events = st.sampled_from(
    [b"data: x\n\n", b"data: x\r\n\r\n", b"data: x\n", b"data: x", b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r", b"0\r\n\r\n"]
)
written = st.tuples(
    sizes | st.just("{:x}"),
    pieces_of_events | st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\r\n"] * 8 + [b"\n"]),
)
last = st.sampled_from(
    [b"", b"0\r\n\r\n", b"000\r\n\r\n", b"0;x\r\nexpires: 0\r\n\r\n", b"0\r\na: b\r\nc: d\r\n\r\nmore", b"0\n\n"]
)


def stream_of(chunks: list[tuple[str, bytes, bytes]]) -> bytes:
    return b"".join(size.format(len(data)).encode() + line + data + b"\r\n" for size, data, line in chunks)


@given(st.lists(written, max_size=6), last, st.lists(st.integers(0, 300), max_size=6))
def test_however_it_is_fed_a_body_tells_the_same(
    chunks: list[tuple[str, bytes, bytes]], end: bytes, cuts: list[int]
) -> None:
    stream = stream_of(chunks) + end
    slowly = Told(byte_by_byte(stream))
    assert Told([stream]) == slowly
    assert Told(pieces_of(stream, cuts)) == slowly


@given(st.lists(pieces_of_events, max_size=6))
def test_each_whole_chunk_is_looked_at_as_its_bytes_are(contents: list[bytes]) -> None:
    chunks = [chunk(content) for content in contents]
    assert Told(chunks).boundaries == Told(byte_by_byte(b"".join(chunks))).boundaries


@given(
    st.lists(st.tuples(st.just("{:x}"), pieces_of_events, st.just(b"\r\n")), max_size=6),
    st.integers(0, 300),
    st.binary(max_size=3),
)
def test_however_it_is_fed_a_damaged_body_tells_the_same(
    chunks: list[tuple[str, bytes, bytes]], where: int, instead: bytes
) -> None:
    stream = stream_of(chunks) + b"0\r\n\r\n"
    stream = stream[:where] + instead + stream[where + 1 :]
    assert Told([stream]) == Told(byte_by_byte(stream))


@pytest.mark.parametrize("size", [b"0x5", b"0X5", b"0000000000000005"])
def test_a_size_that_is_none_is_refused_where_its_chunk_is_whole(size: bytes) -> None:
    with pytest.raises(MalformedChunk):
        ChunkedBody().feed(size + b"\r\nhello\r\n")


@pytest.mark.parametrize("content", [b"\n", b"\r\n"])
def test_one_end_of_line_in_a_chunk_of_its_own_ends_no_event(content: bytes) -> None:
    stream = chunk(b"data: x") + chunk(content)
    assert Told([stream]) == Told(byte_by_byte(stream))
    assert ChunkedBody().feed(stream) == 0


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 1000])
def test_an_event_may_end_with_a_chunk_that_is_its_empty_line(line: bytes, size: int) -> None:
    """As where each line is written by itself."""
    event = chunk(b"data: x" + line) + chunk(line)
    assert ChunkedBody().feed(event) == len(event)
    stream = event * 3
    body = ChunkedBody()
    fed = [body.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert fed[-1] == min(size, len(stream))
    assert sum(map(bool, fed)) == (3 if size == 1 else 1)


def test_one_whole_chunk_is_known_by_its_length() -> None:
    # Less content is read with care: the size line's end could be taken for a part of it.
    lengths = {len(chunk(b"x" * size)): b"%x\r\n" % size for size in range(4, USUAL)}
    for total in range(USUAL):
        line = SIZE_LINES[total]
        assert line == lengths.get(total, line)
        assert (total in lengths) == line.endswith(b"\r\n")
        assert (total in lengths) == (len(line) <= total), "other pieces begin with no such line"


def test_what_ends_an_event_is_found_in_one_whole_chunk() -> None:
    assert chunk(EVENT).endswith(EVENT_ENDS)
    assert chunk(b"data: x\r\n\r\n").endswith(EVENT_ENDS)
    assert not chunk(b"data: x\n").endswith(EVENT_ENDS)
