"""Bodies with their prompt's token ids, and the question whether an engine takes them."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from engines.pretokenized import question, took_ids, with_ids
from indexer.hashing import pack_tokens

IDS = [5, 0, 4_000_000_000]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é"}], "tools": [], "seed": 7}


def told(endpoint: Literal["completions", "chat"], ids: list[int] = IDS, **body: Any) -> Any:
    found = with_ids(endpoint, json.dumps(body).encode(), pack_tokens(ids))
    return None if found is None else json.loads(found)


def test_ids_stand_for_a_completions_text() -> None:
    assert told("completions", model="m", prompt="text", n=2) == {"model": "m", "prompt": IDS, "n": 2}


def test_ids_stand_beside_a_chats_messages() -> None:
    assert told("chat", **CHAT) == {**CHAT, "kv_transfer_params": {"prompt_token_ids": IDS}}


def test_what_means_nothing_is_in_no_ones_way() -> None:
    params = {"kv_transfer_params": {"prompt_token_ids": IDS}}
    given: dict[str, Any] = {"echo": False, "return_prompt_text": None, "kv_transfer_params": None, "suffix": None}
    assert told("chat", **CHAT, **given) == {**CHAT, **given, **params}


@pytest.mark.parametrize(
    "more",
    [{"echo": True}, {"return_prompt_text": True}, {"kv_transfer_params": {}}, {"suffix": "x"}, {"suffix": ""}],
    ids=str,
)
def test_an_engine_that_must_have_the_text_gets_it(more: dict[str, Any]) -> None:
    """And a client that says something of tokens itself is not contradicted."""
    assert told("chat", **CHAT, **more) is None
    assert told("completions", prompt="text", **more) is None


def test_an_empty_prompt_stays_as_it_is() -> None:
    assert told("completions", [], prompt="") is None


def test_a_name_that_is_no_text_is_for_the_engine_to_judge() -> None:
    assert with_ids("completions", b'{"prompt":"x","\xff":1}', pack_tokens(IDS)) is None


def test_the_question_has_one_token_and_messages_of_more() -> None:
    asked = json.loads(question("m", [9, 8]))
    assert (asked["model"], asked["max_tokens"], asked["kv_transfer_params"]) == ("m", 1, {"prompt_token_ids": [9]})
    assert len(asked["messages"][0]["content"].split()) > 1


@pytest.mark.parametrize(
    ("status", "answer", "took"),
    [
        (200, b'{"usage":{"prompt_tokens":1}}', True),
        (200, b'{"usage":{"prompt_tokens":12}}', False),
        (400, b'{"usage":{"prompt_tokens":1}}', False),
        (200, b'{"usage":null}', False),
        (200, b"[" * 100_000, False),
        (0, b"", False),
    ],
)
def test_the_answer_tells_by_its_length_of_prompt(status: int, answer: bytes, took: bool) -> None:
    assert took_ids(status, answer) is took
