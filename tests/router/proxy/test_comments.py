"""When a silent stream's client gets a comment, between transports that only remember."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.chunked import decode_chunks
from router.http.relay import COMMENT, HELD, LAST_CHUNK
from router.openai.errors import error_response
from router.proxy.comments import Comments
from tests.router.http.test_chunked import chunk, pieces_of
from tests.router.proxy.test_exchange import EVENT, EVENTS, LAST, Relayed

HEAD = b"POST %s HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}"
REQUEST = HEAD % b"/v1/completions"
INTERVAL = 10.0
SAID = b": waiting\n\n"
OVERLOADED = b'{"error":{"message":"Full","type":"EngineFull","param":null,"code":"engine_full"}}'


class Commented(Relayed):
    def __init__(self, request: bytes = REQUEST, *, held: bool = False, on: bool = True) -> None:
        super().__init__(request, held, commented=on)
        self.comments = Comments(INTERVAL, self.under_way)

    def tick(self, seconds: float = INTERVAL) -> None:
        """So much time passes until the next round of the router's chores."""
        self.now += seconds
        for exchange in self.under_way:
            exchange.silence(self.now)  # as the watchdog asks each
        self.comments.tick(self.now)

    @property
    def told(self) -> bytes:
        """The body, without its chunks."""
        return decode_chunks(self.body)

    @property
    def error(self) -> dict[str, object]:
        before, _, data = self.told.removeprefix(SAID).rpartition(b"data: ")
        data, _, behind = data.partition(b"\n")
        names = {(b"event: error\n", b"\n"), (b"", b"event: error\n\n")}
        assert (self.body.endswith(LAST_CHUNK), (before, behind) in names) == (True, True)
        told: dict[str, object] = json.loads(data)
        return told


def test_a_stream_that_does_not_begin_is_begun_with_a_comment() -> None:
    stream = Commented()
    stream.tick(INTERVAL - 1)
    assert stream.client.written == b""
    stream.tick(1)
    head, _, body = stream.client.written.partition(b"\r\n\r\n")
    lines = {line.split(b":")[0]: line for line in head.split(b"\r\n")}
    assert lines[b"content-type"] == b"content-type: text/event-stream; charset=utf-8"
    assert lines.keys() >= {b"HTTP/1.1 200 OK", b"transfer-encoding", b"x-request-id", b"x-accel-buffering"}
    assert body == COMMENT == chunk(SAID)
    stream.tick(INTERVAL - 1)
    assert stream.body == COMMENT
    stream.tick(1)
    assert stream.body == 2 * COMMENT
    stream.answer(EVENTS + EVENT + LAST)
    assert stream.body == 2 * COMMENT + EVENT + LAST
    (outcome,) = stream.outcomes
    assert (outcome.status, outcome.end, outcome.first_byte) == (200, "complete", 2 * INTERVAL)


def test_a_request_that_the_router_holds_gets_comments_too() -> None:
    stream = Commented(held=True)
    stream.tick()
    assert stream.body == COMMENT
    stream.send()
    stream.answer(EVENTS, EVENT, LAST)
    assert stream.body == COMMENT + EVENT + LAST


def test_so_does_a_stream_that_has_begun() -> None:
    stream, second = Commented(), chunk(b"data: 2\n\n")
    stream.answer(EVENTS, EVENT)
    stream.tick(INTERVAL)  # in which the event was found
    stream.tick(INTERVAL - 1)
    assert stream.body == EVENT
    stream.answer(second)
    stream.tick(1)
    stream.tick(INTERVAL - 1)
    assert stream.body == EVENT + second
    stream.tick(1)
    assert stream.body == EVENT + second + COMMENT
    stream.answer(LAST)
    assert stream.body == EVENT + second + COMMENT + LAST


@pytest.mark.parametrize(
    ("request_", "on"),
    [(REQUEST, False), (REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"), True)],
    ids=["switched off", "no chunks"],
)
def test_others_get_none(request_: bytes, on: bool) -> None:
    stream = Commented(request_, on=on)
    stream.tick()
    assert stream.client.written == b""
    stream.answer(EVENTS, EVENT)
    stream.tick()
    stream.tick()
    assert SAID not in stream.client.written


def test_a_client_that_does_not_read_gets_none() -> None:
    stream = Commented()
    stream.connection.pause_writing()
    stream.tick()
    assert stream.client.written == b""
    stream.connection.resume_writing()
    stream.tick(1)
    assert stream.body == COMMENT


def test_its_worker_is_asked_for_what_comments_can_be_put_into() -> None:
    encoded = REQUEST.replace(b"host: r", b"host: r\r\naccept-encoding: gzip")
    for on, asked in ((True, b"identity"), (False, b"gzip")):
        assert b"accept-encoding: %s\r\n" % asked in Commented(encoded, on=on).upstream.written


def test_nothing_is_put_into_an_event() -> None:
    """One longer than what is held back, which comes in pieces."""
    stream = Commented()
    event = chunk(b"data: " + b"x" * 2 * HELD + b"\n\n")
    stream.answer(EVENTS, event[:-HELD])
    begun = stream.body
    assert begun == event[:-HELD]
    stream.tick()
    stream.tick()
    assert stream.body == begun
    stream.answer(event[-HELD:])
    stream.tick()
    stream.tick()
    assert stream.body == event + COMMENT


def test_nor_into_an_answer_that_is_no_stream() -> None:
    stream = Commented()
    stream.answer(b"HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n")
    stream.tick()
    assert stream.client.written == b""
    stream.answer(b"{}")
    assert stream.client.status == 400
    assert stream.body == b"{}"


@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: %d\r\n\r\n%s" % (len(OVERLOADED), OVERLOADED),
        b"transfer-encoding: chunked\r\n\r\n" + chunk(OVERLOADED) + LAST,
    ],
    ids=["sized", "chunked"],
)
def test_an_error_after_a_comment_is_an_event(framed: bytes) -> None:
    stream = Commented()
    stream.tick()
    stream.answer(b"HTTP/1.1 422 Bad\r\ncontent-type: application/json\r\n" + framed)
    assert stream.error == {**json.loads(OVERLOADED), "type": "error"}
    (outcome,) = stream.outcomes
    assert (outcome.status, outcome.end) == (422, "complete")
    assert not stream.client.closed


def test_an_answer_of_the_routers_own_is_one_as_well() -> None:
    stream = Commented(held=True)
    stream.tick()
    stream.routed(error_response(429, "Too busy", details={"held": 3}))
    assert stream.error == json.loads(error_response(429, "Too busy", details={"held": 3}).body)
    (outcome,) = stream.outcomes
    assert (outcome.status, outcome.end) == (429, "failed")
    assert not stream.client.closed


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"object":"error","message":"Too long","code":400}', "Too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"msg":"x"}]}', "The answer was 400."),
        (b"<html>", "The answer was 400."),
        (b'{"error":"x"}', "The answer was 400."),
        (b"", "The answer was 400."),
    ],
)
def test_an_error_of_another_form_has_its_text_in_the_event(answer: bytes, message: str) -> None:
    stream = Commented()
    stream.tick()
    stream.answer(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
    error = stream.error["error"]
    assert isinstance(error, dict)
    assert (error["message"], error["code"]) == (message, 400)


def test_the_event_is_as_its_api_has_it() -> None:
    messages, responses = Commented(HEAD % b"/v1/messages"), Commented(HEAD % b"/v1/responses")
    for stream in (messages, responses):
        stream.tick()
        stream.answer(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%s" % (len(OVERLOADED), OVERLOADED))
        assert stream.told.startswith(SAID + b"event: error\ndata: ")
    assert messages.error.keys() == {"type", "error"}
    assert (responses.error["sequence_number"], responses.error["message"]) == (0, "Full")
    busy = Commented(HEAD % b"/v1/messages", held=True)
    busy.tick()
    busy.routed(error_response(503, "Nobody"))
    assert json.loads(busy.told.rpartition(b"data: ")[2])["error"]["type"] == "overloaded_error"


def test_an_answer_that_is_no_stream_after_all_is_one_event() -> None:
    stream = Commented()
    stream.tick()
    stream.answer(b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"a":\n1}\r\n')
    assert stream.told == SAID + b'data: {"a":\ndata: 1}\n\n'
    assert stream.body.endswith(LAST_CHUNK)


@pytest.mark.parametrize("length", [b"content-length: 18\r\n", b""], ids=["sized", "until it closes"])
def test_a_stream_that_has_no_chunks_comes_in_chunks_after_a_comment(length: bytes) -> None:
    stream, two = Commented(), b"data: 1\n\ndata: 2\n\n"
    stream.tick()
    stream.answer(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%s\r\n" % length, two[:12], two[12:])
    if not length:
        stream.at_worker.connection_lost(None)
    assert stream.told == SAID + two
    assert stream.body.endswith(LAST_CHUNK)
    assert not stream.client.closed


def test_a_worker_that_breaks_off_after_a_comment_ends_the_stream_in_an_error() -> None:
    for begun in (b"", b"HTTP/1.1 400 Bad\r\ncontent-length: 9\r\n\r\n{"):
        stream = Commented()
        stream.tick()
        stream.answer(*([begun] if begun else []))
        stream.at_worker.connection_lost(None)
        error = stream.error["error"]
        assert isinstance(error, dict)
        assert "broke off" in error["message"]
        assert not stream.client.closed


def test_the_next_request_is_answered_over_the_same_connection() -> None:
    stream = Commented()
    stream.tick()
    stream.answer(EVENTS + EVENT + LAST)
    stream.connect()
    before = len(stream.client.written)
    stream.connection.data_received(REQUEST)
    stream.answer(EVENTS + EVENT + LAST)
    assert stream.client.written[before:].startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_that_left_is_not_written_to() -> None:
    stream = Commented()
    stream.tick()
    stream.connection.connection_lost(None)
    written = stream.client.written
    stream.tick()
    assert stream.client.written == written
    assert [outcome.end for outcome in stream.outcomes] == ["cancelled"]


events = st.lists(st.sampled_from([b"data: x\n\n", b"event: y\r\ndata: y\r\n\r\n", b"data: z", b"z\n\n"]), max_size=20)
cuts = st.lists(st.integers(0, 400), max_size=12)


@given(events, cuts, st.lists(st.sampled_from([0.0, 5.0, 30.0]), min_size=14, max_size=14))
def test_comments_stand_between_events_and_change_none(
    stream: list[bytes], where: list[int], silences: list[float]
) -> None:
    whole = EVENTS + b"".join(chunk(content) for content in stream) + LAST
    commented, plain = Commented(), Commented(on=False)
    for piece, silence in zip(pieces_of(whole, where), silences, strict=False):
        for each in (commented, plain):
            each.answer(piece)
            each.tick(silence)
    assert commented.told.replace(SAID, b"") == plain.told
    assert [outcome.end for outcome in commented.outcomes] == ["complete"]
    assert all(part.endswith((b"\n\n", b"\r\n\r\n")) or not part for part in commented.told.split(SAID)[:-1])
