"""What came back for a question, judged (pure): exactly one whole answer, or one proper error."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from tests.chaos.questions import Question

Fate = Literal["answered", "refused", "broken"]
"""Whole and right; an HTTP error in OpenAI's shape; begun, and ended with a proper error."""

DONE = b"data: [DONE]"


class Wrong(Exception):
    """What came is none of the three; says why."""


class NotWhole(Wrong):
    """Nothing but the broken connection tells it: enough where a length was stated, never for a stream."""


class Came(NamedTuple):
    """`whole`: the message ended as its framing says; else the connection did."""

    status: int
    body: bytes
    whole: bool


def judge(question: Question, came: Came) -> Fate:
    """Raises Wrong."""
    if not came.whole:
        raise NotWhole("the connection broke before the answer's end")
    if came.status != 200:
        return _refused(came)
    return _stream(question, came) if question.streamed else _plain(question, came)


def _refused(came: Came) -> Fate:
    error = _json(came.body).get("error")
    shaped = isinstance(error, dict) and isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
    if not shaped or came.status < 400:
        raise Wrong(f"status {came.status} without an error of OpenAI's shape")
    return "refused"


def _plain(question: Question, came: Came) -> Fate:
    choices: list[dict[str, Any]] = _json(came.body).get("choices") or [{}]
    if len(choices) != 1:
        raise Wrong(f"{len(choices)} choices for one question")
    _check_text(question, _text(choices[0]), whole=True)
    return "answered"


def _stream(question: Question, came: Came) -> Fate:
    events = [event.removesuffix(b"\nevent: error") for event in came.body.split(b"\n\n")]
    if events.pop() or not all(event.startswith(b"data: ") for event in events):
        raise Wrong("the stream holds what is no whole event")
    done = bool(events) and events[-1] == DONE
    told = [_json(event[6:]) for event in (events[:-1] if done else events)]
    failed = bool(told) and "error" in told[-1]
    if done == failed:
        raise Wrong("the stream ended with neither [DONE] nor an error event")
    _check_stream(question, told[:-1] if failed else told, whole=done)
    return "answered" if done else "broken"


def _check_stream(question: Question, told: list[dict[str, Any]], *, whole: bool) -> None:
    choices = [choice for event in told for choice in event.get("choices", ())]
    if any("error" in event for event in told):
        raise Wrong("the stream went on after an error event")
    finishes = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(finishes) > 1 or (whole and not finishes):
        raise Wrong(f"{len(finishes)} finish reasons in one stream")
    _check_text(question, "".join(map(_text, choices)), whole=whole)


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message")
    text = choice.get("text") if said is None else said.get("content")
    return str(text or "")


def _check_text(question: Question, text: str, *, whole: bool) -> None:
    if text != question.text if whole else not question.text.startswith(text):
        raise Wrong(f"{len(text)} letters of an answer that are not the right {len(question.text)}")


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise Wrong("what should be JSON is none") from None
    if not isinstance(found, dict):
        raise Wrong("what should be a JSON object is none")
    return found
