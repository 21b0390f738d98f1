"""Which requests can go on elsewhere, and what other workers are asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.disaggregation.legs import read_body
from router.migration.bodies import continuation, tokens_left, wants_ids, with_ids
from router.migration.refusal import refusal
from router.tokens import Endpoint

TEXT: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def refused(endpoint: Endpoint, **more: Any) -> str | None:
    asked = CHAT if endpoint == "chat" else TEXT
    return refusal(endpoint, read_body(json.dumps({**asked, **more}).encode()))


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5, "seed": 1, "top_k": 3, "stop_token_ids": [1], "repetition_penalty": 1.1, "min_tokens": 2},
        {"stop": [], "n": 1, "logprobs": None, "echo": False, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"response_format": {"type": "text"}, "user": "u", "cache_salt": "s", "return_token_ids": True},
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_plain_requests(endpoint: Endpoint, more: dict[str, Any]) -> None:
    assert refused(endpoint, **more) is None


@pytest.mark.parametrize(
    "more",
    [
        *({"n": 2.0}, {"n": "2"}, {"best_of": "2"}),
        *({"n": 2}, {"best_of": 2}, {"use_beam_search": True}, {"echo": True}, {"suffix": "x"}, {"logprobs": 1}),
        *({"logprobs": True}, {"prompt_logprobs": 1}, {"stop": "x"}, {"stop": ["x"]}, {"tools": [{}]}),
        *({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {}}, "x": 0}),
        *({"guided_regex": "a"}, {"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"bad_words": ["a b"]}),
        *({"prompt_embeds": "x"}, {"kv_transfer_params": {"a": 1}}, {"vllm_xargs": {"a": 1}}, {"unheard_of": 1}),
        *({"max_tokens": "5"}, {"min_tokens": 2.5}),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_others(endpoint: Endpoint, more: dict[str, Any]) -> None:
    assert refused(endpoint, **more)


def test_no_others_beside_it_are_log_probabilities_too() -> None:
    """A completion says how many others; a chat whether there are to be any."""
    assert refused("completions", logprobs=0)
    assert refused("completions", logprobs=False)  # as vLLM reads it, that is 0
    assert refused("chat", logprobs=False, top_logprobs=0) is None


def test_batches_and_pictures() -> None:
    assert refused("completions", prompt=["a"]) is None
    assert refused("completions", prompt=[[1, 2]]) is None
    assert refused("completions", prompt=["a", "b"])
    parts: list[Any] = [{"type": "text", "text": "x"}, "y"]
    assert refused("chat", messages=[{"role": "user", "content": parts}]) is None
    parts.append({"type": "image_url", "image_url": {"url": "x"}})
    assert refused("chat", messages=[{"role": "user", "content": parts}])
    assert refused("chat", messages=[{"role": "user", "content": 5}])


@pytest.mark.parametrize("content", [b'"\xff"', b'[{"type":"\xff"}]'])
def test_messages_that_are_no_text(content: bytes) -> None:
    """For an engine to judge."""
    assert refusal("chat", read_body(b'{"messages":[{"role":"user","content":%b}]}' % content))


def test_tokens_are_asked_for() -> None:
    body = read_body(json.dumps({**TEXT, "return_token_ids": None}).encode())
    assert not wants_ids(body)
    assert json.loads(with_ids(body)) == {**TEXT, "return_token_ids": True}
    assert wants_ids(read_body(with_ids(body)))


@pytest.mark.parametrize(
    ("endpoint", "stated", "left"),
    [
        ("completions", {}, 13),
        ("completions", {"max_tokens": None}, 87),
        ("completions", {"max_tokens": 20, "max_completion_tokens": 30}, 17),
        ("chat", {"max_tokens": 20, "max_completion_tokens": 30}, 27),
        ("chat", {"max_tokens": 20, "max_completion_tokens": None}, 17),
        ("chat", {}, 87),
    ],
)
def test_how_much_is_left(endpoint: Endpoint, stated: dict[str, Any], left: int) -> None:
    body = read_body(json.dumps(stated).encode())
    assert tokens_left(body, endpoint, 10, 3, 100) == left
    if left == 87:
        assert tokens_left(body, endpoint, 10, 3, None) is None


def test_a_continuation_keeps_what_decides_the_tokens() -> None:
    kept = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "seed": 4}
    more = {"min_tokens": 5, "max_completion_tokens": 50, "truncate_prompt_tokens": 9, "reasoning_effort": "low"}
    body = read_body(json.dumps({**kept, **more, "messages": CHAT["messages"]}).encode())
    asked = json.loads(continuation(body, [1, 2], [3, 4, 5], 47))
    assert asked == {**kept, "prompt": [1, 2, 3, 4, 5], "max_tokens": 47, "min_tokens": 2, "return_token_ids": True}
