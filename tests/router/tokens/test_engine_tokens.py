"""Asking an engine for tokens, and checking ours against its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.description import EngineKind
from router.tokens import CannotTokenize, EngineTokens, Mismatch, PromptTokens, load_tokenizer, verify
from router.tokens.verify import Ids

USER = {"role": "user", "content": "Hi"}


class Engine:
    """Answers every question with the same, or as a tokenizer of its own would, and keeps the questions."""

    def __init__(self, answer: tuple[int, bytes] | Ids = (200, b'{"tokens": [1, 2], "count": 2}')) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        fields = json.loads(body)
        self.asked.append((path, fields))
        if not isinstance(self.answer, tuple):
            endpoint = "chat" if "messages" in fields else "completions"
            return 200, json.dumps({"tokens": self.answer.ids(endpoint, fields)}).encode()  # type: ignore[arg-type]
        return self.answer


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/tokenize"), ("sglang", "/v1/tokenize")])
async def test_a_text_is_asked_for(kind: EngineKind, path: str) -> None:
    engine = Engine()
    assert await EngineTokens(kind, engine.post).ids("completions", {"model": "m", "prompt": ["a", "b"], "n": 3}) == [
        1,
        2,
    ]
    assert engine.asked == [(path, {"model": "m", "prompt": "a"})]


async def test_only_vllm_is_told_about_special_tokens_of_completions() -> None:
    for kind, told in (("vllm", True), ("sglang", False)):
        engine = Engine()
        await EngineTokens(kind, engine.post).ids("completions", {"prompt": "a", "add_special_tokens": False})  # type: ignore[arg-type]
        assert ("add_special_tokens" in engine.asked[0][1]) is told


HARMONY = (200, b'{"tokens": [200006, 17360, 200008]}')
"""How gpt-oss's chats begin."""


@pytest.mark.parametrize("version", ["0.10.2", "0.30.0"])
async def test_a_harmony_chat_is_not_believed_of_an_engine_that_tokenizes_it_by_the_template(version: str) -> None:
    engine = EngineTokens("vllm", Engine(HARMONY).post, version)
    with pytest.raises(CannotTokenize, match="gpt-oss") as caught:
        await engine.ids("chat", {"messages": [USER]})
    assert caught.value.reason == "no_template"
    assert await engine.ids("completions", {"prompt": "<|start|>"}) == [200006, 17360, 200008]


@pytest.mark.parametrize("version", ["0.33.0", None])
async def test_a_newer_engine_tells_the_tokens_of_a_harmony_chat(version: str | None) -> None:
    engine = EngineTokens("vllm", Engine(HARMONY).post, version)
    assert await engine.ids("chat", {"messages": [USER]}) == [200006, 17360, 200008]


async def test_other_chats_are_believed_of_an_older_engine() -> None:
    assert await EngineTokens("vllm", Engine().post, "0.10.2").ids("chat", {"messages": [USER]}) == [1, 2]


async def test_ids_are_not_asked_for() -> None:
    engine = Engine()
    assert await EngineTokens("sglang", engine.post).ids("chat", {"messages": [], "input_ids": [7, 8]}) == [7, 8]
    assert await EngineTokens("vllm", engine.post).ids("completions", {"prompt": [[7, 8], [9]]}) == [7, 8]
    assert engine.asked == []


async def test_a_chat_is_asked_for_with_what_decides_its_tokens() -> None:
    engine = Engine()
    fields = {"model": "m", "messages": [USER], "tools": [{"type": "function"}], "stream": True, "max_tokens": 3}
    assert await EngineTokens("vllm", engine.post).ids("chat", fields) == [1, 2]
    assert engine.asked == [("/tokenize", {"model": "m", "messages": [USER], "tools": [{"type": "function"}]})]


async def test_vllm_is_given_what_only_its_chat_route_derives() -> None:
    engine = Engine()
    old = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    fields = {"messages": [USER, old], "reasoning_effort": "low", "documents": [], "chat_template_kwargs": {"x": 1}}
    await EngineTokens("vllm", engine.post).ids("chat", fields)
    asked = engine.asked[0][1]
    assert asked["chat_template_kwargs"] == {
        "x": 1,
        "documents": [],
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    assert asked["messages"] == [USER, {**old, "reasoning": "r"}]


async def test_sglang_derives_them_itself() -> None:
    engine = Engine()
    fields = {"messages": [USER], "reasoning_effort": "low", "reasoning": {"enabled": True}}
    await EngineTokens("sglang", engine.post).ids("chat", fields)
    assert engine.asked == [("/v1/tokenize", fields)]


async def test_sglang_is_not_asked_for_what_its_chats_pass_over() -> None:
    engine = Engine()
    passed_over = {"add_generation_prompt": False, "add_special_tokens": True}
    fields = {"messages": [USER, {"role": "assistant", "content": "so"}], "continue_final_message": True}
    await EngineTokens("sglang", engine.post).ids("chat", fields | passed_over)
    assert engine.asked == [("/v1/tokenize", fields)]


@pytest.mark.parametrize("answer", [(500, b""), (0, b""), (200, b"{}"), (200, b"no"), (200, b'{"tokens": ["a"]}')])
async def test_any_other_answer_is_a_failure(answer: tuple[int, bytes]) -> None:
    with pytest.raises(CannotTokenize) as caught:
        await EngineTokens("vllm", Engine(answer).post).ids("completions", {"prompt": "a"})
    assert caught.value.reason == "engine"
    assert not caught.value.engine_can


async def test_an_unknown_engine_is_not_asked() -> None:
    engine = Engine()
    with pytest.raises(CannotTokenize):
        await EngineTokens("unknown", engine.post).ids("completions", {"prompt": "a"})
    assert engine.asked == []


async def test_media_are_not_asked_about_for_their_tokens_are_all_alike() -> None:
    engine = Engine()
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(CannotTokenize) as caught:
        await EngineTokens("sglang", engine.post).ids("chat", {"messages": [message]})
    assert (caught.value.reason, engine.asked) == ("multimodal", [])


@pytest.mark.parametrize("messages", [None, 7, "Hi"])
async def test_messages_that_are_no_list_are_not_asked_about(messages: object) -> None:
    with pytest.raises(CannotTokenize, match="not a list"):
        await EngineTokens("vllm", Engine().post).ids("chat", {"messages": messages})


class Off:
    """As the tokenizer, but with one token more in what `when` says."""

    def __init__(self, prompts: PromptTokens, when: str) -> None:
        self._prompts = prompts
        self._when = when

    def ids(self, endpoint: Any, fields: Any) -> list[int]:
        ids = self._prompts.ids(endpoint, fields)
        return [*ids, 99] if self._when in json.dumps(fields, ensure_ascii=False) else ids


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> PromptTokens:
    return PromptTokens(load_tokenizer(model_folder))


async def test_equal_tokens_verify(prompts: PromptTokens) -> None:
    engine = Engine(prompts)
    assert await verify(prompts, EngineTokens("vllm", engine.post), "m") is None
    assert {"messages" in fields for _, fields in engine.asked} == {True, False}
    assert {fields["model"] for _, fields in engine.asked} == {"m"}


@pytest.mark.parametrize(
    ("when", "endpoint"),
    [
        ("1,234", "completions"),
        ("日本語、", "completions"),
        ("careful", "chat"),
        ("Twelve", "chat"),
        ('"tools"', "chat"),
    ],
)
async def test_the_first_difference_is_told(prompts: PromptTokens, when: str, endpoint: str) -> None:
    found = await verify(prompts, EngineTokens("vllm", Engine(Off(prompts, when)).post), "m")
    assert isinstance(found, Mismatch)
    assert found.endpoint == endpoint
    assert found.theirs == found.ours + 1 == found.position + 1
    assert f"token {found.position} differs" in str(found)


async def test_what_we_cannot_render_is_not_compared() -> None:
    class OnlyTexts:
        def ids(self, endpoint: Any, fields: Any) -> list[int]:
            if endpoint == "chat":
                raise CannotTokenize("no_template", "none")
            return [1, 2]

    engine = Engine()
    assert await verify(OnlyTexts(), EngineTokens("vllm", engine.post), "m") is None
    assert all("prompt" in fields for _, fields in engine.asked)


async def test_an_engine_that_answers_nothing_cannot_be_compared_with(prompts: PromptTokens) -> None:
    with pytest.raises(CannotTokenize):
        await verify(prompts, EngineTokens("vllm", Engine((404, b"")).post), "m")
