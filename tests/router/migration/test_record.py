"""What a stream's record makes of single events."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from router.migration.record import MOST_HELD, Ends, Record
from tests.router.migration.engine import ends_whole

NAMES = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"
TOO_DEEP = b"[" * 100_000 + b"]" * 100_000
"""For any Python: what msgspec takes follows its limit of recursion."""


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def told(text: str, ids: list[int] | None, prompt: list[int] | None = None, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason, "prompt_token_ids": prompt, "token_ids": ids}
    return event(**NAMES, choices=[choice])


def chat(delta: dict[str, Any], ids: list[int] | None = None, **more: Any) -> bytes:
    return event(**NAMES, choices=[{"index": 0, "delta": delta, "finish_reason": None, "token_ids": ids}], **more)


ROLE = chat({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])
FAILED = event(error={"message": "EngineCore died.", "type": "InternalServerError", "code": 500})


def opened(as_chat: bool = False, ends: Ends | None = ends_whole) -> Record:
    record = Record(as_chat, shows_ids=False, ends=ends)
    record.feed(ROLE if as_chat else told("a", [5], [1, 2]))
    return record


@pytest.mark.parametrize(
    ("as_chat", "events", "why"),
    [
        (True, [chat({"reasoning": "hm"}, [5])], "reasoning"),
        (True, [chat({"content": "a", "reasoning_content": None}, [5])], "reasoning"),
        (True, [chat({"tool_calls": []}, [5])], "reasoning"),
        (True, [chat({}, [5])], "reasoning"),
        (True, [chat({}, None)], "reasoning"),
        (True, [chat({"content": "a"}, None)], "does not tell"),
        (False, [told("b", None)], "does not tell"),
        (False, [told("\u00e9", [6, 7]), told("b", None)], "does not tell"),
        (False, [told("b", [])], "does not tell"),
        (False, [told("b", [2**32])], "not known"),
        (False, [told("b", [-1])], "not known"),
        (False, [b"data: {nothing}\n\n"], "reasoning"),
        (False, [b'data: {"choices":[{"text":"\xff"}]}\n\n'], "reasoning"),
        (False, [b'data: {"deep":' + TOO_DEEP + b"}\n\n"], "reasoning"),
        (False, [told("", [7])] * (MOST_HELD + 1), "no text"),
    ],
)
def test_what_cannot_go_on(as_chat: bool, events: list[bytes], why: str) -> None:
    record = opened(as_chat)
    for each in events:
        record.feed(each)
    assert why in str(record.cut())
    later = told("later", [9])
    assert record.feed(later) == told("later", None)
    assert record.feed(FAILED) == FAILED, "as every engine's error where nobody could go on"
    assert why in str(record.cut())


def test_what_cannot_go_on_reaches_the_client_whole() -> None:
    record = opened()
    sent = b"".join(record.feed(told("", [7])) for _ in range(MOST_HELD + 1))
    assert sent == told("", None) * (MOST_HELD + 1)


def test_a_client_that_wants_tokens_gets_them_of_a_stream_that_cannot_go_on_too() -> None:
    record = Record(chat=True, shows_ids=True, ends=ends_whole)
    for each in (ROLE, chat({"reasoning": "hm"}, [5]), chat({"content": "a"}, [6])):
        assert record.feed(each) == each


@pytest.mark.parametrize("name", [b"\xff", b'deep":' + TOO_DEEP + b',"x'])
@pytest.mark.parametrize("begun", [False, True])
def test_what_nobody_can_read_passes(begun: bool, name: bytes) -> None:
    """In the first worker's part, and in another's."""
    record = opened() if begun else Record(chat=False, shows_ids=False, ends=ends_whole)
    record.cut()
    for odd in (b'data: {"%b":1,"choices":[]}\n\n' % name, b'data: {"error":{"%b":1,"code":400}}\n\n' % name):
        assert record.feed(odd) == odd


def test_tokens_without_a_prompt_are_none() -> None:
    record = Record(chat=False, shows_ids=False, ends=ends_whole)
    assert record.feed(told("a", [5])) == told("a", None)
    assert "does not tell" in str(record.cut())


DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    "failing",
    [
        FAILED,
        event(object="error", message="gone", code=503),
        event(error={"message": "gone", "code": None}),
        event(error={"message": DIED, "type": "BadRequestError", "code": 400}),  # 0.12
    ],
)
def test_an_engine_that_says_that_it_died_has_broken_off(failing: bytes) -> None:
    record = opened()
    assert record.feed(failing) + record.feed(DONE) == b""
    assert record.failure
    assert record.cut() is None
    assert record.failure is None


def test_an_error_that_is_the_requests_own_is_the_clients() -> None:
    failing = event(error={"message": "too long", "code": 400})
    record = opened()
    assert record.feed(failing) + record.feed(DONE) == failing + DONE
    assert record.failure is None


def test_an_aborted_request_has_broken_off() -> None:
    record = opened()
    assert record.feed(told("", [], reason="abort")) == b""
    assert record.failure == "aborted the request"


def test_words_that_look_like_tokens_stay() -> None:
    record = opened()
    text = '"token_ids":[1,2] "role":'
    assert json.loads(record.feed(told(text, [7]))[6:])["choices"][0]["text"] == text


def test_several_tokens_at_once_want_a_tokenizer() -> None:
    record = opened(ends=None)
    record.feed(told("a", [0, 1]))
    assert "no tokenizer" in str(record.cut())
    record = opened(ends=None)
    record.feed(told("a", [0, 1]))
    record.feed(told("b", [1]))  # which tells that all before it have their text
    assert record.cut() is None


def test_a_parsers_silence_within_a_character_keeps_nothing_to_itself() -> None:
    """An engine that looks for tool calls leaves out the text that there is none of yet."""
    record = opened(as_chat=True)
    assert record.feed(chat({"content": "a"}, [0])) == chat({"content": "a"})
    assert record.feed(chat({}, [11])) + record.feed(chat({}, [12])) == b""
    assert record.cut() is None
    assert list(record.output) == [0]


def test_a_parsers_silence_wants_a_tokenizer() -> None:
    record = opened(as_chat=True, ends=None)
    assert record.feed(chat({}, [11])) == chat({})
    assert "reasoning" in str(record.cut())


def test_the_beginning_of_a_character_is_made_again() -> None:
    record = opened()
    record.feed(told("a", [0, 11, 12]))
    assert record.cut() is None
    assert list(record.output) == [5, 0]


def test_what_was_sent_is_not_made_again_to_find_a_whole_character() -> None:
    record = opened(ends=lambda tokens: len(tokens) < 2)
    record.feed(told("a\ufffd", [0, 1]))
    assert "in the middle of a character" in str(record.cut())
    assert list(record.output) == [5, 0, 1]


def test_a_client_that_has_seen_the_beginning_of_a_character_cannot_get_it_again() -> None:
    record = Record(chat=False, shows_ids=True, ends=ends_whole)
    record.feed(told("ab", [0, 1], [1, 2]))
    assert record.cut() is None
    record.feed(told("a", [0, 11]))
    assert "in the middle of a character" in str(record.cut())


@pytest.mark.parametrize(
    ("last", "with_usage", "events"),
    [
        ([], False, 1),
        ([], True, 2),
        ([event(**NAMES, choices=[], usage={"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4})], True, 1),
        ([DONE], False, 0),
    ],
)
def test_the_end_of_a_stream_whose_tokens_are_all_there(last: list[bytes], with_usage: bool, events: int) -> None:
    record = opened()
    assert record.ending(with_usage) is None
    for each in (told("b", [6], reason="stop"), *last):
        record.feed(each)
    end = record.ending(with_usage)
    assert end is not None
    assert end.count(b"\n\n") == events
    if events == 2:
        usage = json.loads(end.split(b"\n\n")[0][6:])
        assert usage == {**NAMES, "choices": [], "usage": usage["usage"]}
        assert usage["usage"] == {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}


def test_a_stream_that_is_all_there_ends_without_usage_where_no_tokens_were_told() -> None:
    record = Record(chat=False, shows_ids=False, ends=ends_whole)
    record.feed(told("a", None, reason="stop"))
    assert record.ending(with_usage=True) == DONE


def test_the_last_event_of_a_chat_may_say_nothing_but_why_it_ends() -> None:
    last = event(**NAMES, choices=[{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": None}])
    record = opened(as_chat=True)
    record.feed(chat({"content": "a"}, [5]))
    assert record.feed(last) == last
    assert record.ending(with_usage=False) == DONE


def test_of_which_nothing_was_sent_another_begins_anew() -> None:
    """A client that wants tokens has not been told the prompt's."""
    record = Record(chat=False, shows_ids=True, ends=ends_whole)
    first = told("", [11], [1, 2])
    assert record.feed(first) == b""
    assert record.cut() is None
    assert record.feed(first) + record.feed(told("\u00e9", [12])) == first + told("\u00e9", [12])


def test_of_an_engine_that_tells_no_tokens_what_another_counts_is_right() -> None:
    """Nothing but the role was sent, so the other was asked for all of it."""
    record = Record(chat=True, shows_ids=False, ends=ends_whole)
    record.feed(chat({"role": "assistant", "content": ""}))
    assert record.cut() is None
    usage = event(**NAMES, choices=[], usage={"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2})
    assert record.feed(usage) == usage


@pytest.mark.parametrize(
    "more",
    [
        {"queue_time": 0.5},
        {"prompt_tokens_details": {"cached_tokens": 1, "multimodal_tokens": {"image": 1}}},
        {"prompt_tokens_details": 5},
    ],
)
def test_whatever_else_usage_tells_its_counts_are_of_the_whole(more: dict[str, Any]) -> None:
    record = opened()
    assert record.cut() is None
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, **more}
    found = json.loads(record.feed(event(**NAMES, choices=[], usage=usage))[6:])
    assert found["usage"] == {**usage, "prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}


def test_what_is_no_event_of_tokens_passes() -> None:
    record = opened()
    for odd in (b": ping\n\n", b"event: x\ndata: y\n\n"):
        assert record.feed(odd) == odd


@pytest.mark.parametrize("odd", [b": ping\n\n", told("", None), told("", [])])
def test_what_comes_within_a_character_loses_none_of_its_tokens(odd: bytes) -> None:
    """A proxy before the engine may keep the connection alive so."""
    record = opened()
    assert record.feed(told("", [6])) == b""
    assert record.feed(odd) == (odd if odd.startswith(b":") else told("", None))
    assert record.feed(told("\u00e9", [7])) == told("", None) + told("\u00e9", None)
    assert record.cut() is None
    assert list(record.output) == [5, 6, 7]


def test_the_last_event_may_tell_no_tokens() -> None:
    record = opened()
    for each in (told("", [6]), told("", None, reason="length")):
        record.feed(each)
    end = record.ending(with_usage=True)
    assert end is not None
    assert json.loads(end.split(b"\n\n")[0][6:])["usage"]["completion_tokens"] == 2


def test_of_a_long_prompt_its_tokens_are_kept_and_no_more() -> None:
    """Four bytes each."""
    first = told("a", [5], list(range(100_000, 200_000)))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        record = Record(chat=False, shows_ids=False, ends=ends_whole)
        record.feed(bytes(bytearray(first)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.prompt is not None
    assert after - before < 4 * len(record.prompt) * 1.2
