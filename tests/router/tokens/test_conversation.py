"""Messages and tools reach the template in the shapes that vLLM gives them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tokens.conversation import conversation, has_media, tool_definitions
from router.tokens.errors import CannotTokenize
from tests.router.openai.test_any_json import looks

__all__ = ["looks"]

IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}


def one(message: dict[str, Any], *, as_parts: bool = False) -> dict[str, Any]:
    (shown,) = conversation([message], as_parts=as_parts)
    return shown


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("content", "flat", "parts"),
    [
        ("a", "a", [text("a")]),
        (None, "", []),
        ([], "", []),
        ([text("a"), text("b")], "a\nb", [text("a"), text("b")]),
        (["a", {"type": "input_text", "text": "b"}], "a\nb", [text("a"), text("b")]),
        (
            [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}],
            "no\nhm",
            [text("no"), text("hm")],
        ),
        ([{"type": "text", "text": None}, text("b")], "b", [text("b")]),
        ([text(""), text("a"), text(""), text("b"), text("")], "a\nb", [text(each) for each in ("", "a", "", "b", "")]),
        ([text(""), {"type": "refusal", "refusal": "a"}], "a", [text(""), text("a")]),
        ([text("a") | {"cache_control": {"type": "ephemeral"}}], "a", [text("a")]),
    ],
)
def test_content_is_text_or_parts(content: object, flat: str, parts: list[object]) -> None:
    message = {"role": "user", "content": content}
    assert one(message) == {"role": "user", "content": flat}
    assert one(message, as_parts=True) == {"role": "user", "content": parts}


def test_results_of_tools_are_always_text() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [text("a"), text(""), text("b")], "other": 1}
    assert one(message, as_parts=True) == {"role": "tool", "tool_call_id": "c", "content": "a\n\nb"}
    assert one(message) == {"role": "tool", "tool_call_id": "c", "content": "a\nb"}


def test_tool_calls_have_decoded_arguments_and_the_schemas_order() -> None:
    function = {"name": "f", "arguments": '{"x": [1, "é"]}'}
    call = {"index": 0, "type": "function", "function": function, "id": "c"}
    (shown,) = one({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
    assert list(shown.items()) == [
        ("id", "c"),
        ("function", {"arguments": {"x": [1, "é"]}, "name": "f"}),
        ("type", "function"),
        ("index", 0),
    ]
    assert list(shown["function"]) == ["arguments", "name"]
    assert function["arguments"] == '{"x": [1, "é"]}'


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", "3", "[" * 100_000], ids=len)
def test_arguments_that_are_no_mapping_count_as_empty(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (shown,) = one({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert shown["function"]["arguments"] == {}


def test_nobody_looks_for_garbage_while_long_arguments_are_read(looks: list[str]) -> None:
    """Python's lock is held meanwhile: no other thread can go on."""
    arguments = '{"x":[' + "[]," * 100_000 + "[]]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    looks.clear()
    (shown,) = one({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert len(looks) <= 4  # one look before, and one since
    assert len(shown["function"]["arguments"]["x"]) == 100_001


@pytest.mark.parametrize("calls", [[], None])
def test_no_tool_calls_are_not_shown(calls: object) -> None:
    assert "tool_calls" not in one({"role": "assistant", "content": "a", "tool_calls": calls})


@pytest.mark.parametrize(
    "given", [{"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "s"}]
)
def test_reasoning_is_shown_under_both_names(given: dict[str, str]) -> None:
    shown = one({"role": "assistant", "content": "a", **given})
    assert (shown["reasoning"], shown["reasoning_content"]) == ("r", "r")


def test_other_fields_stay_out() -> None:
    message = {"role": "user", "content": "a", "name": "bob", "tool_calls": [1], "reasoning": "r", "x": 1}
    assert one(message) == {"role": "user", "content": "a", "name": "bob"}


def seen(message: dict[str, Any], *, as_parts: bool) -> list[dict[str, Any]] | str:
    try:
        return conversation([message], as_parts=as_parts)
    except CannotTokenize as error:
        return str(error)


texts = st.text(max_size=3) | st.just("x-anthropic-billing-header: 1")
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "text", "refusal", "image_url", 3])},
    optional={"text": texts | st.none() | st.just(7), "refusal": texts, "uuid": st.none() | st.just("u")},
)


@given(
    st.sampled_from(["system", "user", "assistant", "tool", "developer", "other", 7, None, []]),
    texts | st.none() | st.lists(texts | parts, max_size=3),
    st.booleans(),
)
def test_plain_messages_are_shown_as_those_with_more_to_them(role: object, content: object, as_parts: bool) -> None:
    plain = {"role": role, "content": content}
    assert seen(plain, as_parts=as_parts) == seen(plain | {"ignored": 1}, as_parts=as_parts)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [text("a"), IMAGE]}, "multimodal"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "multimodal"),
        ({"role": "user", "content": [{"image_url": "x"}]}, "multimodal"),
        ({"role": "user", "content": [text("a") | {"uuid": "u"}]}, "multimodal"),
        ({"role": "user", "content": [{"type": "thinking"}]}, "malformed"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "multimodal"),
        ({"role": "user", "content": [7]}, "malformed"),
        ({"role": "user", "content": 7}, "malformed"),
        ({"content": "a"}, "malformed"),
        ("user", "malformed"),
        ({"role": "developer", "content": "a"}, "unsupported"),
        ({"role": "system", "content": "x-anthropic-billing-header: 1\nBe kind."}, "unsupported"),
        ({"role": "assistant", "tool_calls": 7}, "malformed"),
        ({"role": "assistant", "tool_calls": [7]}, "malformed"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, "malformed"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "unsupported"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
            },
            "unsupported",
        ),
    ],
)
def test_what_is_not_sure_is_refused(message: Any, reason: str) -> None:
    with pytest.raises(CannotTokenize) as caught:
        one(message)
    assert caught.value.reason == reason


@pytest.mark.parametrize("messages", [None, [], {"role": "user"}, "Hi"])
def test_messages_must_be_a_list(messages: object) -> None:
    with pytest.raises(CannotTokenize, match="messages"):
        conversation(messages, as_parts=False)


@pytest.mark.parametrize(
    ("messages", "media"),
    [
        ([{"role": "user", "content": "a"}], False),
        ([{"role": "user", "content": [text("a"), "b", 7]}], False),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [text("a"), IMAGE]}], True),
        ([7, {"role": "user", "content": [{"type": ["x"]}]}], True),
        ([{"role": "user", "content": [{"image_url": "x"}]}], True),
        (None, False),
    ],
)
def test_media_are_noticed(messages: object, media: bool) -> None:
    assert has_media(messages) is media


def test_tools_are_shown_in_the_schemas_order_with_what_is_missing() -> None:
    tools = [
        {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "strict": True}},
        {"type": "function", "function": {"name": "g", "description": "d"}},
    ]
    shown = tool_definitions(tools)
    assert shown is not None
    assert [list(tool) for tool in shown] == [["type", "function"]] * 2
    assert list(shown[0]["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"b": 1, "a": 2}),
        ("strict", True),
    ]
    assert shown[1]["function"] == {"name": "g", "description": "d", "parameters": None}
    assert tool_definitions(None) is None


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({}, "malformed"),
        ([7], "malformed"),
        ([{"type": "custom", "function": {"name": "f"}}], "malformed"),
        ([{"type": "function"}], "malformed"),
        ([{"function": {"name": "f"}, "defer_loading": True}], "unsupported"),
        ([{"function": {"name": "f", "extra": 1}}], "unsupported"),
        ([{"function": {"name": "f", "strict": None}}], "unsupported"),
    ],
)
def test_other_tools_are_refused(tools: object, reason: str) -> None:
    with pytest.raises(CannotTokenize) as caught:
        tool_definitions(tools)
    assert caught.value.reason == reason
