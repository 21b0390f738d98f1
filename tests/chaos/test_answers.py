"""The judge itself: what it takes for right, and what it must not let pass."""

from __future__ import annotations

import json

import pytest

from tests.chaos.answers import Came, NotWhole, Wrong, judge
from tests.chaos.questions import Question, chat, completion

ASKED = completion("some words ", 3, streamed=True)
PIECES = [ASKED.text[:4], ASKED.text[4:]]
ERROR = {"error": {"message": "Worker a broke off its answer.", "type": "server_error", "code": 502}}
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"text": piece, "finish_reason": finish}]})


WHOLE = text(PIECES[0]) + text(PIECES[1], "length") + DONE


def stream(body: bytes, whole: bool = True) -> Came:
    return Came(200, body, whole)


def test_a_whole_stream_is_an_answer() -> None:
    assert judge(ASKED, stream(WHOLE)) == "answered"


def test_a_chat_is_read_as_chats_are() -> None:
    asked = chat("some words ", 3, streamed=True)
    said = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"content": asked.text}, "finish_reason": "stop"},
    ]
    assert judge(asked, stream(b"".join(event({"choices": [one]}) for one in said) + DONE)) == "answered"


def test_an_error_event_ends_a_stream_properly() -> None:
    assert judge(ASKED, stream(text(PIECES[0]) + event(ERROR))) == "broken"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        text(PIECES[0]),
        text(PIECES[0]) + DONE,
        text(PIECES[0] + PIECES[1], "length"),
        text(ASKED.text) + DONE,
        text("other words", "length") + DONE,
        text("other words") + event(ERROR),
        WHOLE + WHOLE,
        WHOLE + event(ERROR),
        event(ERROR) + WHOLE,
        text(PIECES[0]) + event(ERROR) + event(ERROR),
        text(PIECES[0]) + event(ERROR) + DONE,
        text(ASKED.text, "length") + text("", "length") + DONE,
        WHOLE[:-2],
        b"something " + WHOLE,
        b"data: {\n\n" + DONE,
    ],
)
def test_other_streams_are_wrong(body: bytes) -> None:
    with pytest.raises(Wrong):
        judge(ASKED, stream(body))


def test_a_stream_whose_connection_breaks_is_not_whole_whatever_came() -> None:
    for body in (b"", text(PIECES[0]), WHOLE):
        with pytest.raises(NotWhole):
            judge(ASKED, stream(body, whole=False))


def plain(text: str, choices: int = 1) -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": "length"}] * choices}).encode()


def test_plain_answers() -> None:
    asked: Question = ASKED._replace(streamed=False)
    assert judge(asked, Came(200, plain(asked.text), True)) == "answered"
    for body in (plain("other words"), plain(asked.text, 2), b"[]", b"{}", b"x"):
        with pytest.raises(Wrong):
            judge(asked, Came(200, body, True))


def test_refusals_have_openais_shape() -> None:
    assert judge(ASKED, Came(503, json.dumps(ERROR).encode(), True)) == "refused"
    for status, body in ((503, b""), (503, b'{"error":"no"}'), (503, b"{}"), (204, json.dumps(ERROR).encode())):
        with pytest.raises(Wrong):
            judge(ASKED, Came(status, body, True))
