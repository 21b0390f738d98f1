"""Whether a chat template wants a message's content as text or as a list of parts.

Engines decide this by looking at the template's syntax tree: one that loops over a message's content gets lists. The
rules below are vLLM's, odd corners included, for a different decision means different tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2
from jinja2 import nodes


class _UnexpectedShape(Exception):
    """An assignment or loop that the rules do not cover; vLLM then assumes text."""


def wants_parts(environment: jinja2.Environment, template: str) -> bool:
    """True when messages' content is to be given as `[{"type": "text", "text": …}]`; raises TemplateSyntaxError."""
    root = environment.parse(template)
    try:
        return _loops_over_content(root)
    except _UnexpectedShape:
        return False


def _loops_over_content(root: nodes.Template) -> bool:
    messages = set(_message_names(root))
    parameters = dict(_content_parameters(root, messages))
    in_macros = {id(loop) for macro in root.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    return any(
        any(_refers(loop.iter, name, "content") for name in messages)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters.get(id(loop), ()))
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros)
        for loop in root.find_all(nodes.For)
    )


def _message_names(root: nodes.Template) -> Iterator[str]:
    """Names that stand for one message: targets of loops over `messages` or what was assigned from it."""
    lists = _aliases(root, "messages")
    for loop in root.find_all(nodes.For):
        if any(_refers(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _aliases(root: nodes.Template, first: str) -> list[str]:
    names = [first]
    for name in names:  # grows while it is read
        for assignment in root.find_all(nodes.Assign):
            if _refers(assignment.node, name) and (alias := _name(assignment.target)) not in names:
                names.append(alias)
    return names


def _content_parameters(root: nodes.Template, messages: set[str]) -> Iterator[tuple[int, set[str]]]:
    """For each loop inside a macro, the macro's parameters that are called with a message's content."""
    calls = [c for c in root.find_all(nodes.Call) if isinstance(c.node, nodes.Name)]
    for macro in root.find_all(nodes.Macro):
        found: set[str] = set()
        names = [argument.name for argument in macro.args]
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
                found |= {n for n, value in given if n in names and any(_refers(value, m, "content") for m in messages)}
        for loop in macro.find_all(nodes.For):
            yield id(loop), found


def _refers(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable (or its `key`), perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        return _refers(node.node, name, key)
    if key is None:
        return _refers_plainly(node, name)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _refers_plainly(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _refers_plainly(node.node, name)


def _refers_plainly(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnexpectedShape
    return target.name
