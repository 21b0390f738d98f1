"""What is decoded of a body for the tokenizer gives the same tokens as the whole body does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.description import EngineKind
from router.openai.inference import parse_inference
from router.tokens import CannotTokenize, Endpoint, PromptTokens, load_tokenizer
from tests.router.tokens.conftest import CONFIG, write_model

TEMPLATE = (
    "{{ tools }}{{ documents }}{{ enable_thinking }}{{ reasoning_effort }}{{ x }}{{ add_generation_prompt }}"
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": [1, "é"]}}}

texts = st.text(max_size=6)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": texts})
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": texts | st.none() | st.lists(parts, max_size=2),
    },
    optional={"name": texts, "reasoning": texts, "tool_call_id": texts},
)
ids = st.lists(st.integers(0, 300), min_size=1, max_size=5)
prompts = texts | ids | st.lists(texts, max_size=2) | st.lists(ids, max_size=2)
options = {
    "model": st.just("m"),
    "seed": st.integers(),
    "add_special_tokens": st.booleans() | st.none(),
    "truncate_prompt_tokens": st.none() | st.just(3),
    "suffix": st.none() | st.just("x"),
    "prompt_embeds": st.none() | st.just("x"),
    "media_io_kwargs": st.none() | st.just({}),
    "mm_processor_kwargs": st.none() | st.just({}),
    "tools": st.none() | st.just([TOOL]) | st.just([]),
    "chat_template": st.none() | st.just("own"),
    "chat_template_kwargs": st.none() | st.just({"x": [1], "documents": 2}) | st.just({"tools": 1}),
    "documents": st.none() | st.just([{"a": "b"}]),
    "reasoning_effort": st.none() | st.sampled_from(["low", "none"]),
    "reasoning": st.none() | st.just({"effort": "low"}),
    "add_generation_prompt": st.booleans() | st.none(),
    "continue_final_message": st.booleans(),
    "input_ids": st.none() | ids | st.just("a"),
}
bodies = st.fixed_dictionaries({"prompt": prompts, "messages": st.lists(messages, max_size=3)})
few_options = st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: options[name] for name in names})
)


@pytest.fixture(scope="module")
def by_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[EngineKind, PromptTokens]:
    folder = write_model(tmp_path_factory.mktemp("model"), CONFIG | {"chat_template": TEMPLATE})
    tokenizer = load_tokenizer(folder)
    return {"vllm": PromptTokens(tokenizer), "sglang": PromptTokens(tokenizer, "sglang")}


def result(prompts: PromptTokens, endpoint: Endpoint, fields: dict[str, Any]) -> list[int] | str:
    try:
        return prompts.ids(endpoint, fields)
    except CannotTokenize as error:
        return str(error)


@given(
    st.sampled_from(["completions", "chat"]), st.sampled_from(["vllm", "sglang"]), bodies, few_options, st.booleans()
)
def test_the_same_tokens_or_the_same_refusal(
    by_engine: dict[EngineKind, PromptTokens],
    endpoint: Endpoint,
    kind: EngineKind,
    body: dict[str, Any],
    few: dict[str, Any],
    first: bool,
) -> None:
    whole = few | body if first else body | few
    inference = parse_inference(endpoint, msgspec.json.encode(whole))
    prompts = by_engine[kind]
    assert result(prompts, endpoint, inference.fields()) == result(prompts, endpoint, whole)
    assert inference.whole() == whole
