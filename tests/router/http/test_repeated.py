"""A connection that remembers heads reads exactly what one that parses them all reads."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.front import MAX_PIPELINED
from router.http.messages import Request, Response, request_head
from router.http.reader import _MOST_MISSES, MAX_HEAD
from router.http.repeated import RepeatedRequest, repeated_request, without_length
from tests.examples import examples
from tests.router.http.test_chunked import chunk, pieces_of
from tests.router.http.test_front import CHUNKED, GET, POST, Site

MAX_BODY = 1000


def told(request: Request) -> tuple[object, ...]:
    """All of a request but the number in its Content-Length, which a remembered head does not keep up to date."""
    headers = [header for header in request.head.headers if header[0] != b"content-length"]
    return (request.head._replace(headers=headers), request.body)


class Pair:
    """Two connections that get the same bytes; one never remembers a head."""

    def __init__(self, slow: bool) -> None:
        self.sites = [Site(slow, MAX_BODY), Site(slow, MAX_BODY)]
        self.sites[1].connection._reader._misses = _MOST_MISSES

    def feed(self, data: bytes) -> None:
        for site in self.sites:
            site.feed(data)
            if site.slow:
                site.connection.respond(Response(200, b"%d" % len(site.requests)))

    def check(self) -> None:
        one, other = self.sites
        assert list(map(told, one.requests)) == list(map(told, other.requests))
        assert with_ids_alike(one.transport.written) == with_ids_alike(other.transport.written)
        for name in ("closed", "aborted", "eof", "reading"):
            assert getattr(one.transport, name) == getattr(other.transport, name), name
        assert one.connection.closing == other.connection.closing
        assert repr(one.connection) == repr(other.connection)


def with_ids_alike(written: bytes) -> bytes:
    return re.sub(rb"(x-request-id: )[0-9a-f]{32}", rb"\1made", written)


class Message(NamedTuple):
    line: bytes = b"POST /v1/x HTTP/1.1"
    headers: tuple[bytes, ...] = (b"Host: x", b"Content-Length: %s", b"X-Request-Id: 7", b"Accept: */*")
    """`%s` is where the length goes."""
    length: bytes = b"{}"
    """`{}` is the number."""
    body: bytes = b""
    more: int = 0
    """How much more is stated than there is."""
    before: bytes = b""
    end_of_line: bytes = b"\r\n"

    @property
    def raw(self) -> bytes:
        length = self.length.replace(b"{}", b"%d" % max(0, len(self.body) + self.more))
        headers = [header.replace(b"%s", length) for header in self.headers]
        lines = [self.line, *headers[:-1], headers[-1] + self.end_of_line.removesuffix(b"\r\n")]
        return self.before + b"\r\n".join(lines) + b"\r\n\r\n" + self.body


lengths = st.sampled_from(
    [
        *[b"{}"] * 6,
        b" {}",
        b"\t{}",
        b"{} ",
        b"{}\t",
        b"+{}",
        b"-{}",
        b"0{}",
        b"00000000000{}",
        b"0000000000000000{}",
        b"1000000000000000{}",
        b"",
        b"{},{}",
        b"{}_0",
        b"0x{}",
        b"{}.0",
        b"{}\x00",
        b"\xb2",
        b"\xd9\xa5",
        b"{}\r\n ",
        b"{}\n",
        b"{}\r",
    ]
)
bodies = st.one_of(
    st.sampled_from([b"", b"hello", b'{"a": 1}', b"x" * MAX_BODY, b"x" * (MAX_BODY + 1), GET, POST, CHUNKED]),
    st.builds(lambda body: Message(body=body).raw, st.binary(max_size=5)),
    st.binary(max_size=20),
)
extra = st.sampled_from(
    [
        b"X-More: 1",
        b"Content-Length: 5",
        b"Content-Length: %s",
        b"Content-Length : %s",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding : chunked",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Connection: content-length",
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"X-Long: " + b"y" * 300,
        b"X-Content-Length: %s",
        b"X: a\r\n Content-Length: 5",
        b"X: a\nContent-Length: 5",
        b"X: a\rContent-Length: 5",
        b"",
    ]
)


@st.composite
def changed(draw: st.DrawFn, message: Message) -> Message:
    """`message`, or as good as."""
    headers = list(message.headers)
    match draw(st.sampled_from(["same", "same", "same", "length", "extra", "order", "case", "line", "before", "less"])):
        case "length":
            message = message._replace(length=draw(lengths))
        case "extra":
            headers.insert(draw(st.integers(0, len(headers))), draw(extra))
        case "order":
            headers = list(draw(st.permutations(headers)))
        case "case":
            at = draw(st.integers(0, len(headers) - 1))
            headers[at] = headers[at].swapcase().replace(b"%S", b"%s")
        case "line":
            lines = [b"POST /v1/x HTTP/1.0", b"POST /v1/y HTTP/1.1", b"GET /v1/x HTTP/1.1", b"HEAD /v1/x HTTP/1.1"]
            message = message._replace(
                line=draw(st.sampled_from([*lines, b"post /v1/x HTTP/1.1", b"POST /v1/x HTTP/2.0"]))
            )
        case "before":
            message = message._replace(before=draw(st.sampled_from([b"\r\n", b"\n", b"\r", b" ", b"\r\n\r\n"])))
        case "less":
            headers = headers[:-1] or headers
    more = draw(st.sampled_from([0] * 8 + [-1, 1, 5, MAX_BODY]))
    return message._replace(headers=tuple(headers), body=draw(bodies), more=more)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Messages that are like each other, in pieces that often begin with one."""
    message = draw(changed(Message()))
    cut = draw(st.booleans())
    pieces = [b""]
    for _ in range(draw(st.integers(1, 8))):
        sent = draw(changed(message))
        message = sent if draw(st.booleans()) else message
        raw = sent.raw
        if draw(st.integers(0, 9)) == 0:  # one byte of it is another, or gone
            at = draw(st.integers(0, len(raw) - 1))
            raw = raw[:at] + draw(st.sampled_from([b"", b"\r", b"\n", b" ", b":", b"0", b"x"])) + raw[at + 1 :]
        edges = draw(st.lists(st.integers(-20, 200), max_size=2)) if cut else []
        first, *others = pieces_of(raw, [edge % (len(raw) + 1) for edge in edges])
        if draw(st.integers(0, 4)) == 0:
            pieces[-1] += first
        else:
            pieces.append(first)
        pieces += others
    return [piece for piece in pieces if piece]


@settings(max_examples=examples(400))
@given(streams(), st.booleans())
def test_what_is_remembered_changes_nothing_that_is_read(pieces: list[bytes], slow: bool) -> None:
    pair = Pair(slow)
    for piece in pieces:
        pair.feed(piece)
        pair.check()


@given(st.lists(bodies.filter(lambda body: len(body) <= MAX_BODY), min_size=1, max_size=6), st.data())
def test_honest_requests_are_all_read_however_they_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    pair = Pair(slow=False)
    for body in sent:
        cuts = data.draw(st.lists(st.integers(0, 300), max_size=3))
        for piece in pieces_of(Message(body=body).raw, cuts):
            pair.feed(piece)
    pair.check()
    assert [request.body for request in pair.sites[0].requests] == sent


# -- what is remembered, and what is not


class NoParser:
    def feed_data(self, data: bytes) -> None:
        raise AssertionError(f"parsed: {data!r}")


def remembering(raw: bytes = Message(body=b"hello").raw, slow: bool = False) -> Site:
    """A site that was sent `raw` once and can parse nothing any more."""
    site = Site(slow, MAX_BODY)
    site.feed(raw)
    site.connection._reader._parser = cast("httptools.HttpRequestParser", NoParser())
    return site


@pytest.mark.parametrize("length", [b"{}", b" {}", b"\t{}", b"00{}"])
@pytest.mark.parametrize("body", [b"", b"hello", b"x" * MAX_BODY])
def test_the_same_head_is_not_parsed_again(length: bytes, body: bytes) -> None:
    site = remembering(Message(length=length, body=b"hello").raw)
    for _ in range(3):
        site.feed(Message(length=length, body=body).raw)
    assert [request.body for request in site.requests] == [b"hello", *[body] * 3]
    assert site.requests[0].head is site.requests[3].head
    assert site.transport.written.count(b"HTTP/1.1 200 OK\r\n") == 4


def test_a_body_that_comes_in_pieces_is_not_parsed_either() -> None:
    site = remembering()
    raw = Message(body=b"0123456789").raw
    for piece in pieces_of(raw, [len(raw) - 10, len(raw) - 9, len(raw) - 3]):
        site.feed(piece)
    assert site.requests[1].body == b"0123456789"


@pytest.mark.parametrize("missing", [1, 4])
def test_a_body_that_is_refused_is_named_as_its_request(missing: int) -> None:
    site = remembering()
    site.feed(Message(body=b"slow").raw[:-missing])
    site.connection._refuse_rest(408, "too slow")
    assert b"x-request-id: 7\r\n" in site.transport.written


def test_the_end_of_a_body_and_the_next_request_may_come_together() -> None:
    pair = Pair(slow=False)
    pair.feed(Message(body=b"hello").raw)
    raw = Message(body=b"0123456789").raw
    pair.feed(raw[:-6])
    pair.feed(raw[-6:-3])
    pair.feed(raw[-3:] + Message(body=b"again").raw + GET)
    pair.check()
    assert [request.body for request in pair.sites[0].requests] == [b"hello", b"0123456789", b"again", b""]


def test_a_slow_answer_makes_remembered_requests_wait_their_turn() -> None:
    site = remembering(slow=True)
    for number in range(MAX_PIPELINED):
        assert site.transport.reading
        site.feed(Message(body=b"%d" % number).raw)
    assert not site.transport.reading
    assert len(site.requests) == 1
    site.connection.respond(Response(200))
    assert site.transport.reading
    assert [request.body for request in site.requests] == [b"hello", b"0"]


@pytest.mark.parametrize(
    "raw",
    [
        GET,
        CHUNKED,
        Message(line=b"POST /v1/x HTTP/1.0", body=b"hello").raw,
        Message(
            line=b"POST /v1/x HTTP/1.0", headers=(b"Connection: keep-alive", b"Content-Length: %s"), body=b"hello"
        ).raw,
        Message(headers=(b"Host: x", b"Connection: close", b"Content-Length: %s"), body=b"hello").raw,
        Message(headers=(b"Host: x", b"Expect: 100-continue", b"Content-Length: %s"), body=b"hello").raw,
        Message(
            headers=(b"Host: x", b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: %s"), body=b"hello"
        ).raw,
        Message(length=b"0000000000000000{}", body=b"hello").raw,
        Message(length=b"{} ", body=b"hello").raw,
        Message(before=b"\r\n\r\n", body=b"hello").raw,
    ],
)
def test_where_more_than_the_head_decides_nothing_is_remembered(raw: bytes) -> None:
    site = Site()
    site.feed(raw)
    assert len(site.requests) == 1
    assert site.connection._reader._repeated is None


def test_a_connect_with_a_length_is_read_as_the_parser_reads_it() -> None:
    pair = Pair(slow=False)
    for _ in range(3):
        pair.feed(b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\ncontent-length: 5\r\n\r\n" + b"\r\n" * 3)
        pair.check()
    assert [request.body for request in pair.sites[0].requests] == [b""] * 3


def test_a_head_in_pieces_is_parsed_and_remembered_no_more_than_it_came_whole() -> None:
    site = Site()
    for piece in pieces_of(POST, [20]):
        site.feed(piece)
    assert len(site.requests) == 1
    assert site.connection._reader._repeated is None


# -- smuggling

VICTIM = b"GET /secret HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (Message(length=b"+{}", body=VICTIM), 400),
        (Message(length=b"{},{}", body=VICTIM), 400),
        (Message(length=b"-{}", body=VICTIM), 400),
        (Message(length=b"0x{}", body=VICTIM), 400),
        (Message(length=b"{}_0", body=VICTIM), 400),
        (Message(length=b"\xb2", body=VICTIM), 400),
        (Message(length=b"", body=VICTIM), 400),
        (Message(length=b"{}\r", body=VICTIM), 400),
        (Message(length=b"{}\n", body=VICTIM), 400),
        (Message(length=b"{}\r\n ", body=VICTIM), 400),
        (Message(length=b"{}\r\nContent-Length: 0", body=VICTIM), 400),
        (Message(length=b"0\r\nContent-Length: {}", body=VICTIM), 400),
        (Message(length=b"{}\r\nTransfer-Encoding: chunked", body=b"0\r\n\r\n" + VICTIM), 400),
        (Message(length=b"{}\r\nTransfer-Encoding: chunked", body=chunk(VICTIM) + b"0\r\n\r\n"), 400),
        (Message(length=b"{}\r\nTransfer-Encoding: identity", body=VICTIM), 400),
        (Message(length=b"99999999999999999999", body=VICTIM), 400),
        (Message(length=b"18446744073709551616", body=VICTIM), 400),
        (Message(length=b"999999999999999", body=VICTIM), 413),
        (Message(length=b"0000000000001001", body=VICTIM), 413),
        (Message(body=b"x" * (MAX_BODY + 1)), 413),
    ],
)
def test_what_would_be_smuggled_is_refused_behind_a_remembered_head_too(message: Message, status: int) -> None:
    pair = Pair(slow=False)
    honest = Message(body=b"hello").raw
    for raw in (honest, honest, message.raw):
        pair.feed(raw)
    pair.check()
    site = pair.sites[0]
    assert [request.body for request in site.requests] == [b"hello", b"hello"]
    assert site.transport.written.split(b"HTTP/1.1 ")[-1].startswith(b"%d" % status)
    assert site.transport.eof
    pair.feed(VICTIM)
    pair.check()
    assert len(site.requests) == 2


def test_what_stands_in_a_body_stays_there() -> None:
    site = remembering()
    for body in (VICTIM, Message(body=VICTIM).raw, b"\r\n\r\n" + VICTIM):
        site.feed(Message(body=body).raw)
        assert site.requests[-1].body == body
    assert {request.head.path for request in site.requests} == {b"/v1/x"}


def test_what_follows_a_body_is_the_next_request() -> None:
    pair = Pair(slow=False)
    pair.feed(Message(body=b"hello").raw)
    pair.feed(Message(body=b"hello").raw + VICTIM + Message(body=b"again").raw)
    pair.check()
    assert [(r.head.path, r.body) for r in pair.sites[0].requests] == [
        (b"/v1/x", b"hello"),
        (b"/v1/x", b"hello"),
        (b"/secret", b""),
        (b"/v1/x", b"again"),
    ]


# -- limits and memory


def test_a_head_larger_than_the_limit_is_refused_behind_one_that_was_remembered() -> None:
    large = Message(headers=(*Message().headers, b"X: " + b"y" * (MAX_HEAD - 200)), body=b"hello")
    site = remembering(large.raw)
    site.feed(large.raw)
    assert len(site.requests) == 2
    pair = Pair(slow=False)
    for message in (large, large, large._replace(headers=(*large.headers, b"X: " + b"y" * 200))):
        pair.feed(message.raw)
    pair.check()
    assert pair.sites[0].transport.written.count(b"HTTP/1.1 431 ") == 1


def test_a_body_that_is_refused_is_not_kept() -> None:
    site = Site(max_body=MAX_BODY)
    for body in (b"hello", b"hello", b"x" * 2 * MAX_BODY):
        site.feed(Message(body=body).raw)
    assert site.connection._reader._missing == 0
    assert site.connection._reader._body == []
    assert b"HTTP/1.1 413 " in site.transport.written


def test_a_connection_whose_heads_keep_changing_remembers_none() -> None:
    site = Site()
    for number in range(_MOST_MISSES + 1):
        site.feed(Message(line=b"POST /v1/%d HTTP/1.1" % number, body=b"hello").raw)
    for _ in range(5):
        assert (site.connection._reader._repeated, site.connection._reader._begins) == (None, b"")
        site.feed(Message(body=b"hello").raw)
    assert len(site.requests) == _MOST_MISSES + 6


def test_a_head_that_is_seen_again_in_time_starts_the_count_anew() -> None:
    site = Site()
    for number in range(20):
        for _ in range(2):
            site.feed(Message(line=b"POST /v1/%d HTTP/1.1" % number, body=b"hello").raw)
    assert site.connection._reader._repeated is not None
    assert len(site.requests) == 40


def test_what_a_message_began_with_is_not_kept_behind_its_end() -> None:
    site = Site()
    for raw in (CHUNKED, GET, POST, POST + CHUNKED):
        site.feed(raw)
        assert site.connection._reader._begins == b""
    assert site.connection._reader._body == []


# -- the pure part


def remembered(message: Message) -> RepeatedRequest:
    head = request_head(b"POST", b"/v1/x", [(b"host", b"x")], keep_alive=True, http_1_0=False)
    found = repeated_request(message.raw, head)
    assert found
    return found


@given(st.binary(max_size=30), st.binary(max_size=10))
def test_a_head_is_found_where_it_stands_and_its_length_is_told(body: bytes, rest: bytes) -> None:
    raw = Message(body=body).raw
    assert remembered(Message(body=b"hello")).find(raw + rest) == (len(raw) - len(body), len(body))


@given(st.integers(0, 200))
def test_less_than_the_whole_head_is_not_found(length: int) -> None:
    raw = Message().raw
    found = remembered(Message(body=b"hello")).find(raw[:length])
    assert (found is None) == (length < len(raw))


@pytest.mark.parametrize("digits", [15, 16, 17, 30])
def test_no_number_longer_than_can_be_meant_is_taken(digits: int) -> None:
    found = remembered(Message()).find(Message(length=b"0" * digits).raw)
    assert (found is None) == (digits > 15)


def test_a_head_less_its_number() -> None:
    raw = b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-LENGTH: 42\r\nb: 2\r\n\r\n"
    assert without_length(raw) == (raw.replace(b"42", b"#"), 42)
    for other in (b"HTTP/1.1 200 OK\r\na: 1\r\n\r\n", raw.replace(b"42", b"+42"), raw.replace(b"42", b"4" * 16)):
        assert without_length(other) == (other, None)


@pytest.mark.parametrize(
    "raw",
    [
        POST.replace(b"host: x\r\n", b"host: x\n"),
        POST.replace(b"5\r\n\r\n", b"5\n\n"),
        POST.replace(b"5\r\n\r\n", b"5\r\n\n"),
        POST.replace(b"5\r\n\r\n", b"5\n\r\n"),
        POST.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
        POST.replace(b"host: x\r\n", b"host: x\r"),
        POST.replace(b"host: x\r\n", b"host: x\r\n y\r\n"),
    ],
)
def test_the_parser_takes_no_other_end_of_line(raw: bytes) -> None:
    """A remembered head ends with the first empty line: that must be where the parser ends it."""
    with pytest.raises(httptools.HttpParserError):
        httptools.HttpRequestParser(object()).feed_data(raw)
