"""The requests that the recordings show, and what else is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.shaping import parse_tokenize, rank_headers, tokenize_body, tokenize_path
from tests.engines.recordings import exchanges

NAMES = [("vllm", "vllm-0.32.0"), ("sglang", "sglang-0.5.23"), ("sglang", "sglang-0.5.18")]


def recorded(name: str, step: str) -> dict[str, Any]:
    return next(exchange for exchange in exchanges(name) if exchange["step"].startswith(step))


def test_both_engines_read_one_header() -> None:
    expected = [(b"X-data-parallel-rank", b"11")]
    assert rank_headers("vllm", 11) == rank_headers("sglang", 11) == expected
    assert rank_headers("unknown", 11) == []


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("step", ["tokenize text", "tokenize chat"])
def test_tokenize_as_recorded(kind: Any, name: str, step: str) -> None:
    exchange = recorded(name, step)
    request = exchange["request"]
    assert tokenize_path(kind) == request["path"]
    assert json.loads(tokenize_body({**request["body"], "temperature": 0, "stream": True})) == request["body"]
    answered = exchange["response"]["body"]
    assert parse_tokenize(json.dumps(answered).encode()) == answered["tokens"] != []


def test_an_unknown_engine_has_no_such_path() -> None:
    assert tokenize_path("unknown") is None


def test_what_decides_a_chats_tokens_is_passed_on_and_nothing_else() -> None:
    deciding = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = {**deciding, "max_tokens": 5, "prompt": "not this", "chat_template": None, "seed": 1}
    assert json.loads(tokenize_body(request)) == deciding


def test_a_prompt_passes_on_its_special_tokens_flag() -> None:
    request = {"model": "m", "prompt": "hello", "add_special_tokens": False}
    assert json.loads(tokenize_body({**request, "tools": [], "n": 2})) == request


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"null", b'{"tokens":null}', b'{"tokens":["a"]}', b'{"tokens":[true]}', b'{"tokens":[-1]}',
     b'{"tokens":[4294967296]}', b'{"tokens":[1.5]}', b'{"tokens":[1]', b'{"x":' * 100_000],
)  # fmt: skip
def test_other_answers_are_errors(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_tokenize(body)
