"""The short ways of our environment lead where the sandbox leads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.tokens.sandbox import environment

OURS = environment()
PLAIN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
NAMES = [*dir(dict), *dir(LoopContext), *dir(list), "role", "content", "_Namespace__attrs", "", "é"]

names = st.sampled_from(sorted(set(NAMES)))
VALUES: list[Any] = [0, True, None, "text", [1], {"a": 1}, 1.5, "{}".format, [].append, len, str, SimpleNamespace()]
values = st.sampled_from(VALUES)


def described(found: Any) -> object:
    """Functions that guard `str.format`, and undefined values, are made anew each time."""
    if isinstance(found, Undefined):
        return type(found), found._undefined_message
    return getattr(found, "__name__", None) if callable(found) else (type(found), found)


def loop() -> LoopContext:
    context = LoopContext([1, 2, 3], Undefined)
    next(context)
    return context


@given(st.dictionaries(names, values, max_size=4), names)
def test_items_of_dicts_and_namespaces(items: dict[str, Any], name: str) -> None:
    for holder in (items, Namespace(items)):
        assert described(OURS.getattr(holder, name)) == described(PLAIN.getattr(holder, name))


@pytest.mark.parametrize("name", NAMES)
def test_attributes_of_loops_and_of_what_is_unsafe(name: str) -> None:
    assert described(OURS.getattr(loop(), name)) == described(PLAIN.getattr(loop(), name))
    others: list[Any] = [[], "text", 7, len, dict, loop, Undefined(name="x")]
    for value in others:
        try:
            expected = described(PLAIN.getattr(value, name))
        except Exception as error:  # noqa: BLE001 - whatever it is
            with pytest.raises(type(error)):
                OURS.getattr(value, name)
        else:
            assert described(OURS.getattr(value, name)) == expected


messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "items"])}, optional={"content": st.text(max_size=3)}
    ),
    max_size=5,
)
SOURCE = """
{%- set ns = namespace(last=messages | length - 1, role=none) -%}
{% for m in messages[::-1] %}{% if ns.role is none and m.role == "user" %}
{% set ns.role = m.role %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{% for message in messages %}
{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }} {{ loop.index0 > ns.last }}
{{ message.role }}: {{ message.content }}{{ message.get("content") }}{{ message.items() | list | length }}
{% if message.content is defined and message.content.startswith("a") %}!{% endif %}
{{ loop.previtem is defined and loop.previtem.role }}{{ loop.nextitem }}
{{ ns.missing }}{{ message.missing }}{{ message['role'] }}
{% endfor %}{{ ns.role }}{{ ns.last }}
"""
OUR_TEMPLATE, PLAIN_TEMPLATE = OURS.from_string(SOURCE), PLAIN.from_string(SOURCE)


@given(messages)
def test_a_template_shows_the_same(messages: list[dict[str, str]]) -> None:
    assert OUR_TEMPLATE.render(messages=messages) == PLAIN_TEMPLATE.render(messages=messages)
