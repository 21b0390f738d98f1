"""Templates see what `apply_chat_template` shows them; what cannot be rendered is refused, never guessed."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from router.tokens.chat_template import ChatTemplate, ChatTemplates
from router.tokens.errors import CannotTokenize
from tests.router.tokens.conftest import CHATML, SYSTEM_FIRST

NAMESPACE = "{% set n = namespace() %}{% set n.x = messages %}"
MACRO = "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or (USER,), **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ ['é'] | tojson(ensure_ascii=true, separators=(',', ':')) }}", '["\\u00e9"]'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abHic"),
        ("{{ documents is none }} {{ tools is none }} {{ add_generation_prompt }}", "True True True"),
        ("<{{ messages[0].missing }}>", "<>"),
    ],
)
def test_the_environment(source: str, text: str) -> None:
    assert render(source) == text


def test_the_date_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + n) for n in (-1, 0, 1)}  # noqa: DTZ011


def test_variables_win_over_special_tokens_and_lose_to_the_request() -> None:
    source = "{{ bos_token }} {{ x }} {{ add_generation_prompt }}"
    variables = {"bos_token": "B", "x": 1, "add_generation_prompt": True}
    assert render(source, variables=variables, add_generation_prompt=False) == "B 1 False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ missing | tojson }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_failing_or_forbidden_template_is_refused(source: str) -> None:
    with pytest.raises(CannotTokenize) as caught:
        render(source)
    assert caught.value.reason == "template_error"
    assert "Hi" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% nosuchtag %}"])
def test_an_invalid_template_is_refused(source: str) -> None:
    with pytest.raises(CannotTokenize, match="not valid"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source", ["{{ documents | tojson(indent=4) }}", "{{ documents | tojson(indent=4) | length }}"]
)
def test_what_is_nested_deeply_is_not_indented(source: str) -> None:
    shallow = [{"a": {"b": [1, 2]}}]
    assert render(source, variables={"documents": shallow})
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert json.loads(render("{{ documents | tojson }}", variables={"documents": deep})) == deep
    with pytest.raises(CannotTokenize) as caught:
        render(source, variables={"documents": deep})
    assert caught.value.reason == "malformed"


def test_a_text_many_times_as_long_as_the_request_is_refused() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}"
    variables = {"bos_token": "x" * 1000}
    assert len(render(source, *[USER] * 1000, variables=variables, size=200_000)) == 1_002_000
    with pytest.raises(CannotTokenize) as caught:
        render(source, *[USER] * 1000, variables=variables, size=20_000)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, "So far ", "<|im_start|>assistant\nSo far "),
        (CHATML.replace("m['content']", "m['content'] | trim"), "So far ", "<|im_start|>assistant\nSo far"),
        (
            "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
            ["a", "b "],
            "[a][b ",
        ),
    ],
)
def test_a_last_message_can_be_left_open(source: str, content: str | list[str], text: str) -> None:
    shown = content if isinstance(content, str) else [{"type": "text", "text": part} for part in content]
    message = {"role": "assistant", "content": shown}
    before = repr(message)
    assert render(source, message, continue_final_message=True, add_generation_prompt=False) == text
    assert repr(message) == before


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].role }} content"])
def test_a_message_that_is_not_shown_cannot_be_left_open(source: str) -> None:
    with pytest.raises(CannotTokenize):
        render(source, continue_final_message=True)


def test_a_message_nested_deeper_than_python_copies_is_continued() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    calls = [{"function": {"arguments": arguments}}]
    message = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], "tool_calls": calls}
    source = "{{ messages[0].content[0].text }}."
    assert render(source, message, continue_final_message=True, add_generation_prompt=False) == "Hi"
    assert message["content"] == [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% set ms = messages[1:] %}{% for m in ms %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}", True),
        (
            MACRO + "{% for m in messages %}{{ f(m.content) }}{% endfor %}",
            True,
        ),
        (
            MACRO + "{% for m in messages %}{{ f(c=m.content) }}{% endfor %}",
            True,
        ),
        (
            MACRO + "{% for m in messages %}{{ f(m.role) }}{% endfor %}",
            False,
        ),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ f(tools) }}", False),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
        # An assignment to a namespace is beyond vLLM's analysis, which then assumes text.
        (
            NAMESPACE + "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
            False,
        ),
    ],
)
def test_who_loops_over_content_gets_parts(source: str, parts: bool) -> None:
    assert ChatTemplate(source, {}).wants_parts is parts


def test_aliases_in_a_circle_end() -> None:
    assert not ChatTemplate("{% set a = messages %}{% set messages = a %}{{ a }}", {}).wants_parts


def test_templates_are_chosen_by_name_and_compiled_once() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert templates.choose(with_tools=False) is templates.choose(with_tools=False)
    assert templates.choose(with_tools=True).render([USER]) == "tools"


@pytest.mark.parametrize(
    ("sources", "takes"),
    [
        ({"default": CHATML}, True),
        ({"default": SYSTEM_FIRST}, False),
        ({"default": CHATML, "tool_use": SYSTEM_FIRST}, False),
        ({"default": "{{ raise_exception('Never.') }}", "tool_use": CHATML}, False),
        ({}, False),
    ],
)
def test_whether_the_system_may_say_something_later(sources: dict[str, str], takes: bool) -> None:
    assert ChatTemplates(sources, {}).takes_system_later is takes
