"""The worker's connection, driven through a transport that only remembers, and the heads that it remembers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.chunked import decode_chunks
from router.http.relay import Relay, relay_for
from router.http.upstream import _MAX_HEAD, _MOST_HEADS, BOOKED, Framing, Head, KnownHeads, WorkerConnection, parse_head
from tests.examples import examples
from tests.router.http.test_chunked import chunk, pieces_of
from tests.router.http.test_front import FakeTransport

# -- heads


def read(parse: Callable[[bytes, bool], tuple[Head, int | None]], raw: bytes, head_only: bool) -> object:
    try:
        return parse(raw, head_only)
    except httptools.HttpParserError as error:
        return type(error)


lines = st.sampled_from(
    [
        *[b"Content-Length: %d"] * 3,
        b"content-length:%d",
        b"content-length: %d ",
        b"content-length: 0%d",
        b"content-length: 1%015d",
        b"content-length: +%d",
        b"content-length: %d, %d",
        b"content-length: %d\r\n 5",
        b"content-length: %d\ncontent-length: 5",
        b"x-content-length: %d",
        b"Transfer-Encoding: chunked",
        b"transfer-encoding: gzip, chunked",
        b"Connection: close",
        b"Connection: keep-alive, x-own",
        b"X-Own: %d",
        b"Content-Type: text/event-stream; charset=utf-8",
        b"Content-Type: application/json",
        b"Date: Mon, 01 Jan 2024 00:00:0%d GMT",
        b"X-Request-Id: 7",
        b"nonsense",
    ]
)
status_lines = st.sampled_from(
    [b"HTTP/1.1 200 OK"] * 3
    + [b"HTTP/1.0 200 OK", b"HTTP/1.1 204 None", b"HTTP/1.1 304 Same", b"HTTP/1.1 503 No", b"HTTP/1.1 100 On", b"HTTP"]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    number = draw(st.integers(1, 5) | st.integers(1, 10**15))
    written = [draw(status_lines), *draw(st.lists(lines, max_size=4))]
    return (
        b"\r\n".join(line.replace(b"%015d", b"%015d" % number).replace(b"%d", b"%d" % number) for line in written)
        + b"\r\n\r\n"
    )


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(heads(), st.booleans()), min_size=1, max_size=5), st.data())
def test_a_head_that_was_seen_before_is_read_as_the_parser_reads_it(
    seen: list[tuple[bytes, bool]], data: st.DataObject
) -> None:
    known = KnownHeads()
    for raw, head_only in [*seen, *data.draw(st.permutations(seen))]:
        assert read(known.read, raw, head_only) == read(parse_head, raw, head_only)


@given(st.lists(st.integers(1, 10**15 - 1), min_size=2, max_size=5), st.booleans())
def test_heads_that_differ_in_their_length_alone_are_one(lengths: list[int], first: bool) -> None:
    known, headers = KnownHeads(), [b"content-length: %d\r\n", b"date: today\r\n"]
    template = b"HTTP/1.1 200 OK\r\n" + b"".join(headers if first else headers[::-1]) + b"\r\n"
    found = [known.read(template % length, False) for length in lengths]
    assert [length for _, length in found] == lengths
    assert all(head is found[0][0] for head, _ in found)
    assert len(known._heads) == 1


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_whether_a_connection_is_kept_does_not_depend_on_a_length_of_zero(lengths: tuple[int, int]) -> None:
    known = KnownHeads()
    for length in lengths:
        head, _ = known.read(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length, False)
        assert head.keep_alive
    assert parse_head(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")[0].keep_alive


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_worker_that_closes_behind_an_answer_without_a_body_is_believed(status: bytes) -> None:
    head, _ = parse_head(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
    assert not head.keep_alive


@pytest.mark.parametrize("length", [b"", b"content-length: 5\r\n"])
def test_so_is_one_that_closes_behind_an_answer_to_head(length: bytes) -> None:
    head, _ = parse_head(b"HTTP/1.1 200 OK\r\n%s\r\n" % length, head_only=True)
    assert head.keep_alive
    head, _ = parse_head(b"HTTP/1.1 200 OK\r\n%sConnection: Close\r\n\r\n" % length, head_only=True)
    assert not head.keep_alive


def test_blanks_behind_a_header_do_not_belong_to_it() -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%s\r\ntransfer-encoding: chunked%s\r\n\r\n"
    head, _ = parse_head(raw % (b"content-encoding: identity \t", b" "))
    assert (head.framing, head.events) == ("chunked", True)


@pytest.mark.parametrize("encoding", [b"", b"content-encoding: gzip\r\n"])
@pytest.mark.parametrize(
    ("kind", "added"),
    [
        (b"text/event-stream", b"x-accel-buffering: no\r\n"),
        (b"text/event-stream; charset=utf-8", b"x-accel-buffering: no\r\n"),
        (b"application/json", b""),
    ],
)
def test_nginx_is_told_not_to_collect_events(kind: bytes, added: bytes, encoding: bytes) -> None:
    lines = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s" % (kind, encoding)
    head, _ = parse_head(lines + b"\r\n")
    assert head.passed_on == lines + added


def test_what_a_worker_tells_nginx_passes_if_it_may() -> None:
    lines = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-accel-buffering: yes\r\n"
    assert parse_head(lines + b"\r\n", passing={b"content-type", b"x-accel-buffering"})[0].passed_on == lines
    assert parse_head(lines + b"\r\n")[0].passed_on == lines.replace(b"yes", b"no")


def test_a_length_without_a_number_is_not_taken_for_the_last() -> None:
    known = KnownHeads()
    known.read(b"HTTP/1.1 200 OK\r\ncontent-length:5\r\n\r\n", False)
    with pytest.raises(httptools.HttpParserError):
        known.read(b"HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\n", False)


def test_no_more_heads_are_remembered_than_are_likely_to_come_again() -> None:
    known = KnownHeads()
    for number in range(3 * _MOST_HEADS):
        known.read(b"HTTP/1.1 200 OK\r\nx-number: %d\r\ncontent-length: 5\r\n\r\n" % number, False)
        assert 1 <= len(known._heads) <= _MOST_HEADS


def test_answers_to_head_are_not_remembered() -> None:
    """They look like others, and have no body."""
    known, raw = KnownHeads(), b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    assert known.read(raw, True)[0].framing == "empty"
    assert not known._heads
    assert known.read(raw, False)[0].framing == "sized"
    assert known.read(raw, True) == (known.read(raw, False)[0]._replace(framing="empty"), 5)


def test_heads_that_make_no_sense_are_not_remembered() -> None:
    known = KnownHeads()
    for _ in range(2):
        with pytest.raises(httptools.HttpParserError):
            known.read(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", False)
    assert not known._heads


# -- the connection


class Client:
    """A receiver that keeps what it is told. `passing`: it takes whole events directly, as an exchange does."""

    def __init__(self, connection: WorkerConnection, passing: bool = False) -> None:
        self._connection = connection
        self._passing = passing
        self.relay: Relay | None = None
        self.head: tuple[Head, int | None] | None = None
        self.came: list[bytes] = []
        self.sent = b""
        """What the relay made of the body."""
        self.boundaries: list[int] = []
        self.chunks = 0
        self.end = ""

    @property
    def body(self) -> bytes:
        return b"".join(self.came)

    def write(self, data: bytes) -> None:
        assert not self.end
        self.came.append(data)
        self.sent += data

    def on_head(self, head: Head, length: int | None) -> None:
        assert self.head is None
        self.head = head, length
        self.relay = relay_for(head, http_1_0=False)

    def on_body(self, data: bytes, boundary: int) -> None:
        assert not self.end
        assert self.relay
        if boundary:
            self.boundaries.append(len(self.body) + boundary)
        self.came.append(data)
        self.sent += self.relay.body(data, boundary)
        if self._passing:
            self._connection.pass_events(self.write if self.relay.clean else None)

    def on_chunks(self, chunks: int) -> None:
        assert not self.end
        assert chunks >= self.chunks
        self.chunks = chunks

    def on_end(self) -> None:
        assert not self.end
        self.end = "end"

    def on_broken(self, reason: str) -> None:
        assert not self.end
        self.end = reason


class Line:
    """A connection and what it is fed."""

    def __init__(self, known: KnownHeads | None = None) -> None:
        self.transport = FakeTransport()
        self.given_back = 0
        self.gone = 0
        self.connection = WorkerConnection(known or KnownHeads(), self._give_back, self._discard)
        self.connection.connection_made(self.transport)

    def _give_back(self, connection: WorkerConnection, usable: bool) -> None:
        assert connection is self.connection
        self.given_back += usable

    def _discard(self, connection: WorkerConnection) -> None:
        self.gone += 1

    def ask(self, head_only: bool = False, passing: bool = False) -> Client:
        client = Client(self.connection, passing)
        self.connection.send(client, b"GET / HTTP/1.1\r\n\r\n", b"", head_only)
        return client

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)

    def asked(self, *pieces: bytes) -> Client:
        client = self.ask()
        self.feed(*pieces)
        return client


EVENT = chunk(b"data: x\n\n")
LAST = b"0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"


class Answer(NamedTuple):
    head: bytes
    body: bytes
    framing: Framing
    interim: bytes
    """Heads before the head."""
    head_only: bool = False
    chunks: int = 0

    @property
    def raw(self) -> bytes:
        return self.interim + self.head + self.body


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    interim = draw(
        st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: </a>\r\n\r\n" * 2])
    )
    framing: Framing = draw(st.sampled_from(["sized", "chunked", "chunked", "empty", "close"]))
    if framing == "chunked":
        parts = draw(
            st.lists(
                st.sampled_from([b"data: x\n\n", b"data: y\r\n\r\n", b"data: z", b"\n\n", b"0\r\n\r\n"]), max_size=40
            )
        )
        body = b"".join(map(chunk, parts)) + draw(st.sampled_from([LAST, LAST, b"0\r\na: b\r\n\r\n"]))
        return Answer(draw(st.sampled_from([CHUNKED, EVENTS])), body, framing, interim, chunks=len(parts))
    body = draw(st.binary(min_size=1, max_size=50) | st.sampled_from([LAST, SIZED]))
    if framing == "sized":
        return Answer(SIZED.replace(b"5", b"%d" % len(body)), body, framing, interim)
    if framing == "close":
        return Answer(UNTIL_CLOSE, body, framing, interim)
    if draw(st.booleans()):
        return Answer(b"HTTP/1.1 204 No Content\r\n\r\n", b"", framing, interim)
    return Answer(draw(st.sampled_from([SIZED, CHUNKED, UNTIL_CLOSE])), b"", framing, interim, head_only=True)


cuts = st.lists(st.integers(0, 400), max_size=8)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(answers(), cuts), min_size=1, max_size=4), st.booleans())
def test_answers_one_after_the_other_arrive_whole_however_they_are_cut(
    sent: list[tuple[Answer, list[int]]], passing: bool
) -> None:
    known = KnownHeads()
    line = Line(known)
    for number, (answer, where) in enumerate(sent):
        client = line.ask(answer.head_only, passing)
        for piece in pieces_of(answer.raw, where):
            assert client.end == ""
            line.feed(piece)
            if line.connection._chunked:
                assert line.connection._chunked.chunks - client.chunks < BOOKED
        assert client.head == parse_head(answer.head, answer.head_only)
        assert client.head[0].framing == answer.framing
        assert client.body == answer.body
        assert client.chunks == answer.chunks
        if answer.framing == "close":
            assert client.end == ""
            line.connection.connection_lost(None)
            assert (line.given_back, line.gone, client.end) == (number, 1, "end")
            return
        assert client.end == "end"
        assert (line.given_back, line.transport.aborted) == (number + 1, False)
        assert line.connection.requests == number + 1


@given(answers().filter(lambda answer: answer.framing != "empty"), cuts, st.integers(0, 400), st.booleans())
def test_what_breaks_off_is_told(answer: Answer, where: list[int], end: int, passing: bool) -> None:
    line = Line()
    client = line.ask(passing=passing)
    raw = answer.raw[: end % len(answer.raw)]
    for piece in pieces_of(raw, where):
        line.feed(piece)
    has_head = len(raw) >= len(answer.interim + answer.head)
    assert (client.head is not None) == has_head
    assert client.body == raw[len(answer.interim + answer.head) :]
    line.connection.connection_lost(None)
    ends = answer.framing == "close" and has_head
    assert client.end == ("end" if ends else "the connection was closed")
    assert (line.given_back, line.gone) == (0, 1)


events = st.lists(st.integers(1, 300).map(lambda length: b"data: " + b"x" * length + b"\n\n"), max_size=40)


@given(events, cuts, st.integers(0, 4000))
def test_events_that_are_passed_directly_break_off_behind_a_whole_one(
    stream: list[bytes], where: list[int], broken_at: int
) -> None:
    body = b"".join(map(chunk, stream))
    ends = [0, *(len(b"".join(map(chunk, stream[: n + 1]))) for n in range(len(stream)))]
    line = Line()
    client = line.ask(passing=True)
    line.feed(EVENTS)
    for piece in pieces_of(body[:broken_at], [*where, *ends]):
        line.feed(piece)
    line.connection.connection_lost(ConnectionResetError("reset"))
    assert client.end == "reset"
    if broken_at:
        assert client.relay
        last = client.relay.broken(b"data: gone\n\n")
        assert last is not None
        whole = [event for event, end in zip(stream, ends[1:], strict=True) if end <= broken_at]
        assert decode_chunks(client.sent + last) == b"".join([*whole, b"data: gone\n\n"])


@given(events.filter(len), cuts)
def test_events_that_are_passed_directly_are_all_there_and_counted(stream: list[bytes], where: list[int]) -> None:
    line = Line()
    client = line.ask(passing=True)
    line.feed(EVENTS)
    for number, event in enumerate(stream[:-1], 1):
        line.feed(chunk(event))
        assert number - client.chunks < BOOKED
    line.feed(*pieces_of(chunk(stream[-1]), where), LAST)
    assert client.relay
    assert client.sent + client.relay.end() == client.body == b"".join(map(chunk, stream)) + LAST
    assert (client.chunks, client.end) == (len(stream), "end")


def test_of_events_that_are_passed_directly_each_sixteenth_is_told() -> None:
    line = Line()
    client = line.ask(passing=True)
    line.feed(EVENTS)
    told = []
    for _ in range(3 * BOOKED):
        line.feed(EVENT)
        told.append(client.chunks)
    assert sorted(set(told)) == [1, BOOKED, 2 * BOOKED, 3 * BOOKED]


def test_what_looks_like_an_event_inside_a_chunk_is_none() -> None:
    line = Line()
    client = line.ask(passing=True)
    body = EVENT + chunk(EVENT)
    line.feed(CHUNKED, *pieces_of(body, [len(EVENT), len(EVENT) + 3, len(body) - 2]), LAST)
    assert (client.body, client.chunks, client.end) == (body + LAST, 2, "end")


def test_directly_passed_is_only_what_is_one_whole_event() -> None:
    line = Line()
    client = line.ask(passing=True)
    seen: list[bytes] = []
    line.feed(EVENTS, EVENT)
    line.connection.pass_events(seen.append)
    line.feed(EVENT, chunk(b"data: y\r\n\r\n"))
    assert seen == [EVENT, chunk(b"data: y\r\n\r\n")]
    others = [
        EVENT + EVENT,
        chunk(b"data: z"),
        b"9;x\r\ndata: x\n\n\r\n",
        b"09\r\ndata: x\n\n\r\n",
        EVENT[:4],
        EVENT[4:],
    ]
    for piece in others:
        line.connection.pass_events(seen.append)
        before = len(client.came)
        line.feed(piece)
        assert client.came[before:] == [piece]
    assert len(seen) == 2
    line.connection.pass_events(None)
    line.feed(EVENT)
    assert len(seen) == 2


def test_the_next_answer_is_not_passed_to_the_last_client() -> None:
    line = Line()
    first = line.ask(passing=True)
    line.feed(EVENTS, EVENT, EVENT, LAST)
    second = line.ask()
    line.feed(EVENTS, EVENT, EVENT, LAST)
    assert first.body == second.body == EVENT + EVENT + LAST


def test_a_piece_that_cannot_be_a_chunk_is_not_passed() -> None:
    line = Line()
    client = line.ask(passing=True)
    line.feed(EVENTS, EVENT, b"-f\r\n" + b"x" * 13 + b"\n\n\r\n")
    assert client.end == "a chunk's size is no hexadecimal number"


@pytest.mark.parametrize(
    "body", [b"xyz\r\n", b"+5\r\nhello\r\n", b"-5\r\n", b"5_0\r\n", b"\r\n", b"5" * 5000, b"5\r\nhello\r\nzz\r\n"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_malformed_chunks_break_the_answer(body: bytes, whole: bool) -> None:
    line = Line()
    client = line.asked(*([CHUNKED + body] if whole else [CHUNKED, body]))
    assert client.end.startswith("a chunk's size")
    assert line.transport.aborted
    line.connection.connection_lost(None)
    assert (line.given_back, line.gone) == (0, 1)


@pytest.mark.parametrize(
    ("answer", "body"), [(SIZED + b"hello!", b"hello"), (CHUNKED + EVENT + LAST + SIZED, EVENT + LAST)]
)
@pytest.mark.parametrize("cut", [0, 3])
def test_more_than_the_answer_ends_it_and_the_connection(answer: bytes, body: bytes, cut: int) -> None:
    line = Line()
    client = line.asked(*pieces_of(answer, [len(answer) - cut] if cut else []))
    assert client.body == body
    assert (client.end, line.transport.aborted, line.given_back) == ("end", True, 0)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (SIZED, b"hello"),
        (CHUNKED, LAST),
        (EVENTS, EVENT + LAST),
    ],
)
@pytest.mark.parametrize("close", [b"HTTP/1.0 200", b"HTTP/1.1 200 OK\r\nconnection: close"])
def test_a_connection_that_the_worker_closes_is_not_given_back(head: bytes, body: bytes, close: bytes) -> None:
    line = Line()
    client = line.asked(
        head.replace(b"HTTP/1.1 200", close, 1) if b"1.0" in close else head.replace(b"HTTP/1.1 200 OK", close), body
    )
    assert (client.body, client.end) == (body, "end")
    assert (line.given_back, line.transport.aborted) == (0, True)


def test_a_connection_whose_request_was_answered_before_it_was_sent_is_not_given_back() -> None:
    """What the worker has not taken of it, and may never take, would stand before the next one."""
    line = Line()
    client = line.ask()
    line.transport.unsent = 1000
    line.feed(SIZED, b"hello")
    assert (client.body, client.end) == (b"hello", "end")
    assert (line.given_back, line.transport.aborted) == (0, True)


@pytest.mark.parametrize("noise", [b"x", SIZED + b"hello"])
def test_what_nobody_asked_for_ends_the_connection(noise: bytes) -> None:
    line = Line()
    line.feed(noise)
    assert line.transport.aborted
    line = Line()
    line.asked(SIZED + b"hello")
    assert (line.given_back, line.transport.aborted) == (1, False)
    line.feed(noise)
    assert line.transport.aborted


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        SIZED.replace(b"\r\n\r\n", b"\r\nb ad: x\r\n\r\n"),
    ],
)
def test_what_is_no_answer(answer: bytes) -> None:
    line = Line()
    client = line.asked(answer)
    assert (client.head, client.end) == (None, "its answer is not valid HTTP")
    assert line.transport.aborted


@pytest.mark.parametrize("before", [b"\r\n", b"\r\n\r\n"])
def test_empty_lines_before_an_answer_are_passed_over(before: bytes) -> None:
    client = Line().asked(before + SIZED + b"hello")
    assert (client.body, client.end) == (b"hello", "end")


def test_a_long_head_is_read_and_not_remembered() -> None:
    known = KnownHeads([b"metadata"])
    raw = b"HTTP/1.1 200 OK\r\nmetadata: %s\r\ncontent-length: 5\r\n\r\n" % (b"x" * (_MAX_HEAD - 100))
    head, length = known.read(raw, False)
    assert (head.status, length, len(known._heads)) == (200, 5, 0)
    line = Line()
    client = line.ask()
    for start in range(0, len(raw), 65_536):
        line.feed(raw[start : start + 65_536])
    line.feed(b"hello")
    assert (client.body, client.end) == (b"hello", "end")


def test_a_head_that_never_ends() -> None:
    line = Line()
    client = line.ask()
    for _ in range(_MAX_HEAD // 1000 + 1):
        line.feed(b"x" * 1000)
    assert (client.end, line.transport.aborted) == ("its answer's head is too long", True)


def test_interim_answers_that_never_end() -> None:
    line, interim = Line(), b"HTTP/1.1 100 Continue\r\n\r\n" * 1000
    client = line.ask()
    line.feed(interim)
    line.feed(SIZED + b"hello")
    assert (client.body, client.end) == (b"hello", "end")
    client = line.ask()
    for _ in range(_MAX_HEAD // len(interim)):
        line.feed(interim)
    assert client.end == ""
    line.feed(interim * 2)
    assert (client.end, line.transport.aborted) == ("its answer's head is too long", True)


def test_a_body_of_no_bytes_is_complete_with_its_head() -> None:
    client = Line().asked(SIZED.replace(b"5", b"0"))
    assert (client.head and client.head[1], client.body, client.end) == (0, b"", "end")


def test_a_body_that_its_connections_end_should_end_may_break_off_too() -> None:
    line = Line()
    client = line.asked(UNTIL_CLOSE + b"x")
    line.connection.connection_lost(ConnectionResetError("reset"))
    assert (client.body, client.end) == (b"x", "reset")


def test_a_reset_is_told_in_words_alone() -> None:
    line = Line()
    client = line.asked(SIZED)
    line.connection.connection_lost(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    assert client.end == "Connection reset by peer"


def test_interim_answers_alone_are_none() -> None:
    line = Line()
    client = line.asked(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n")
    assert (client.head, client.end) == (None, "")
    line.connection.connection_lost(None)
    assert client.end == "the connection was closed"


def test_any_number_of_interim_answers() -> None:
    client = Line().asked(b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + SIZED + b"hello")
    assert (client.body, client.end) == (b"hello", "end")


def test_switching_protocols_is_no_answer() -> None:
    client = Line().asked(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n")
    assert client.end == "its answer is not valid HTTP"


def test_a_client_that_leaves_while_it_is_told_hears_no_more() -> None:
    class Leaving(Client):
        def on_head(self, head: Head, length: int | None) -> None:
            super().on_head(head, length)
            line.connection.abort()

    for answer in (SIZED + b"hello", CHUNKED + EVENT + LAST, UNTIL_CLOSE + b"x", b"HTTP/1.1 204 None\r\n\r\n"):
        line = Line()
        client = Leaving(line.connection)
        line.connection.send(client, b"", b"", head_only=False)
        line.feed(answer)
        line.feed(b"more")
        line.connection.connection_lost(None)
        assert (client.body, client.end, line.given_back) == (b"", "", 0)


def test_a_client_that_leaves_with_the_last_bytes_does_not_hear_that_they_were_the_last() -> None:
    class Leaving(Client):
        def on_body(self, data: bytes, boundary: int) -> None:
            super().on_body(data, boundary)
            line.connection.abort()

    for answer in (SIZED + b"hello", CHUNKED + EVENT + LAST, UNTIL_CLOSE + b"x"):
        line = Line()
        client = Leaving(line.connection)
        line.connection.send(client, b"", b"", head_only=False)
        line.feed(answer)
        line.connection.connection_lost(None)
        assert (answer.endswith(client.body), client.end, line.given_back) == (True, "", 0)


# -- slow clients


def test_a_paused_connection_reads_again_when_it_is_resumed() -> None:
    line = Line()
    line.asked(SIZED)
    line.connection.pause()
    assert not line.transport.reading
    line.connection.resume()
    assert line.transport.reading


def test_a_connection_that_was_paused_reads_when_it_is_given_back() -> None:
    line = Line()
    client = line.asked(SIZED)
    line.connection.pause()
    line.feed(b"hello")  # what was on its way
    assert client.end == "end"
    assert (line.given_back, line.transport.reading) == (1, True)


def test_what_was_not_paused_is_not_resumed_and_what_is_closed_is_let_be() -> None:
    line = Line()
    line.transport.reading = False
    line.connection.resume()
    assert not line.transport.reading
    line = Line()
    line.transport.abort()
    line.connection.pause()
    assert line.transport.reading


# -- requests


@pytest.mark.parametrize("size", [0, 1, 16 * 1024 - 1, 16 * 1024, 100_000])
def test_a_request_is_its_head_and_its_body(size: int) -> None:
    line = Line()
    line.connection.send(Client(line.connection), b"head", b"x" * size, head_only=False)
    assert line.transport.written == b"head" + b"x" * size
