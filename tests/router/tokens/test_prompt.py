"""The whole way from a request's fields to ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from router.tokens import CannotTokenize, PromptTokens, load_tokenizer
from tests.router.tokens.conftest import CONFIG, write_model

USER = {"role": "user", "content": "Hi"}
SHOW = "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents }}|{{ x }}"


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> PromptTokens:
    return PromptTokens(load_tokenizer(model_folder))


def showing(folder: Path, template: str, **options: Any) -> PromptTokens:
    return PromptTokens(load_tokenizer(write_model(folder, CONFIG | {"chat_template": template})), **options)


@pytest.mark.parametrize("prompt", ["the fox", ["the fox", "the dog"]])
def test_text_gets_special_tokens_unless_told_otherwise(
    prompts: PromptTokens, reference: tokenizers.Tokenizer, prompt: object
) -> None:
    expected = reference.encode("the fox").ids
    assert prompts.ids("completions", {"prompt": prompt}) == expected
    assert prompts.ids("completions", {"prompt": prompt, "add_special_tokens": True}) == expected
    assert prompts.ids("completions", {"prompt": prompt, "add_special_tokens": False}) == expected[1:]


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7]]])
def test_ids_are_taken_as_they_are_even_without_a_tokenizer(prompt: object) -> None:
    assert PromptTokens(None).ids("completions", {"prompt": prompt}) == [5, 6]


def test_a_chat_is_rendered_and_gets_no_special_tokens(prompts: PromptTokens, reference: tokenizers.Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    expected = reference.encode(text, add_special_tokens=False).ids
    assert prompts.ids("chat", {"messages": [USER]}) == expected
    assert prompts.ids("chat", {"messages": [USER], "add_special_tokens": True}) == [0, *expected]


def test_the_end_of_a_chat(prompts: PromptTokens, reference: tokenizers.Tokenizer) -> None:
    closed = prompts.ids("chat", {"messages": [USER], "add_generation_prompt": False})
    assert reference.decode(closed, skip_special_tokens=False).endswith("Hi<|im_end|>\n")
    left_open = {"messages": [USER], "add_generation_prompt": False, "continue_final_message": True}
    assert reference.decode(prompts.ids("chat", left_open), skip_special_tokens=False).endswith("Hi")


def test_a_template_is_shown_a_list_without_tools_as_it_is(tmp_path: Path, reference: tokenizers.Tokenizer) -> None:
    prompts = showing(tmp_path, "{{ 'none' if tools is none else tools | length }}")
    for fields, shown in (({"tools": []}, "0"), ({"tools": None}, "none"), ({}, "none")):
        assert reference.decode(prompts.ids("chat", {"messages": [USER], **fields})) == shown


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "|||None|"),
        ({"reasoning_effort": "low"}, "|True|low|None|"),
        ({"reasoning_effort": "none"}, "|False|none|None|"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "x": 1}}, "|False|low|None|1"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "|True|low|None|"),
        ({"documents": [], "chat_template_kwargs": {"documents": [1]}}, "|||[]|"),
        ({"chat_template_kwargs": None}, "|||None|"),
    ],
)
def test_variables_of_the_request(
    tmp_path: Path, reference: tokenizers.Tokenizer, fields: dict[str, Any], shown: str
) -> None:
    ids = showing(tmp_path, SHOW).ids("chat", {"messages": [USER], **fields})
    assert reference.decode(ids) == "Hi" + shown


def test_a_template_that_loops_over_content_gets_parts(tmp_path: Path, reference: tokenizers.Tokenizer) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    ids = showing(tmp_path, template).ids("chat", {"messages": [USER]})
    assert reference.decode(ids) == "[Hi]"


def test_tools_choose_the_template(tmp_path: Path, reference: tokenizers.Tokenizer) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    prompts = PromptTokens(load_tokenizer(write_model(tmp_path, CONFIG | {"chat_template": named})))
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    assert reference.decode(prompts.ids("chat", {"messages": [USER], "tools": None})) == "plain"
    ids = prompts.ids("chat", {"messages": [USER], "tools": tools})
    assert json.loads(reference.decode(ids)) == tools


def test_a_template_in_the_request_is_not_rendered(prompts: PromptTokens) -> None:
    fields = {"messages": [USER], "chat_template": "own {{ messages[0].content }}"}
    with pytest.raises(CannotTokenize, match="template in the request"):
        prompts.ids("chat", fields)


@pytest.mark.parametrize(
    ("endpoint", "fields", "reason"),
    [
        ("completions", {}, "malformed"),
        ("completions", {"prompt": []}, "malformed"),
        ("completions", {"prompt": [[]]}, "malformed"),
        ("completions", {"prompt": 7}, "malformed"),
        ("completions", {"prompt": [{"a": 1}]}, "malformed"),
        ("completions", {"prompt": "a", "add_special_tokens": 1}, "malformed"),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 5}, "untold"),
        ("completions", {"prompt": "a", "suffix": "b"}, "untold"),
        ("completions", {"prompt": [5, 6], "lora_path": "adapter"}, "untold"),
        ("chat", {"messages": [USER], "extra_key": "tenant"}, "untold"),
        ("completions", {"prompt": "a", "prompt_embeds": "x"}, "unsupported"),
        ("chat", {}, "malformed"),
        ("chat", {"messages": [USER], "continue_final_message": True}, "malformed"),
        ("chat", {"messages": [USER], "chat_template_kwargs": 7}, "malformed"),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "unsupported"),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"enable_thinking": None}}, "unsupported"),
        ("chat", {"messages": [USER], "chat_template_kwargs": {"effort": "auto"}}, "unsupported"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        ("chat", {"messages": [USER], "tools": {}}, "malformed"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    prompts: PromptTokens, endpoint: Any, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotTokenize) as caught:
        prompts.ids(endpoint, fields)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("endpoint", "fields"), [("completions", {"prompt": "a"}), ("chat", {"messages": [USER]})])
def test_without_a_tokenizer_text_is_refused(endpoint: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(CannotTokenize) as caught:
        PromptTokens(None).ids(endpoint, fields)
    assert caught.value.reason == "no_tokenizer"
    assert caught.value.engine_can


def test_a_model_rendered_by_code_still_has_completions(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    prompts = PromptTokens(load_tokenizer(folder))
    assert prompts.ids("completions", {"prompt": "a"})
    with pytest.raises(CannotTokenize) as caught:
        prompts.ids("chat", {"messages": [USER]})
    assert caught.value.reason == "no_template"


def test_sglang_keeps_text_as_text_and_always_adds_special_tokens(
    tmp_path: Path, reference: tokenizers.Tokenizer
) -> None:
    either = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% endfor %}{% endif %}"
    template = f"{{% for m in messages %}}{either}{{% endfor %}}"
    prompts = showing(tmp_path, template, engine="sglang")
    assert reference.decode(prompts.ids("chat", {"messages": [USER]})) == "Hi"
    assert prompts.ids("completions", {"prompt": "a", "add_special_tokens": False})[0] == 0


TEXT, IMAGE = {"type": "text", "text": "Last"}, {"type": "image_url", "image_url": {"url": "data:,x"}}


@pytest.mark.parametrize("last", ["Last", [TEXT], [IMAGE, TEXT]], ids=str)
def test_in_front_of_media_stands_what_the_messages_behind_them_make_of_it(
    tmp_path: Path, reference: tokenizers.Tokenizer, last: object
) -> None:
    """Templates look ahead, as for the last question, since which an assistant's thoughts are shown."""
    template = "{{ messages | length }}{{ messages[-1].content }}:{% for m in messages %}{{ m.content }};{% endfor %}"
    messages = [USER, {"role": "user", "content": [IMAGE]}, {"role": "user", "content": last}]
    tokens = showing(tmp_path, template).before_media({"messages": messages})
    assert reference.decode(tokens.tolist()) == "3Last:Hi;"


def test_where_the_template_does_not_show_the_first_medium_nothing_in_front_of_it_is_known(tmp_path: Path) -> None:
    prompts = showing(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    messages = [USER, {"role": "tool", "content": [IMAGE]}, USER]
    assert prompts.before_media({"messages": messages}).tolist() == []


@pytest.mark.parametrize("ids", [[5, 6], np.array([5, 6], np.uint32)], ids=type)
def test_sglang_takes_ids_in_place_of_messages(prompts: PromptTokens, model_folder: Path, ids: object) -> None:
    fields = {"messages": [USER], "input_ids": ids, "tools": []}
    assert PromptTokens(load_tokenizer(model_folder), "sglang").ids("chat", fields) == [5, 6]
    fields = {"messages": [USER], "input_ids": ids}
    assert prompts.ids("chat", fields) == prompts.ids("chat", {"messages": [USER]})


@pytest.mark.parametrize("ids", [[], "a", ["a"], {}, 7])
def test_other_input_ids_are_refused(model_folder: Path, ids: object) -> None:
    prompts = PromptTokens(load_tokenizer(model_folder), "sglang")
    with pytest.raises(CannotTokenize) as caught:
        prompts.ids("chat", {"messages": [USER], "input_ids": ids})
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "none"}},
        {"messages": [{"role": "assistant", "content": "so", "reasoning": "hm"}, USER]},
        {"messages": [{"role": "assistant", "content": "so", "reasoning_content": "hm"}, USER]},
        {"messages": [{"role": "assistant", "content": "so", "tool_calls": []}, USER]},
        {"messages": [{"role": "tool", "content": "so", "tool_call_id": None}, USER]},
        {"messages": [{"role": "system", "content": "so", "tool_call_id": "a"}, USER]},
        {"messages": [{"role": "system", "content": "so", "tools": []}, USER]},
        {"messages": [{"role": "System", "content": "so"}, USER]},
        {"messages": [USER | {"name": "bob"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [USER, {"role": "assistant", "content": "so"}]},
    ],
)
def test_where_sglang_differs_its_own_answer_is_needed(model_folder: Path, fields: dict[str, Any]) -> None:
    prompts = PromptTokens(load_tokenizer(model_folder), "sglang")
    with pytest.raises(CannotTokenize) as caught:
        prompts.ids("chat", {"messages": [USER], **fields})
    assert caught.value.reason == "unsupported"
    assert caught.value.engine_can
