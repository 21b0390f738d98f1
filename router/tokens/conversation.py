"""From the messages of a chat request to what the engine hands to its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from router.tokens.errors import CannotTokenize
from router.uncollected import uncollected

Message = dict[str, Any]

# The part types that are text, and the field that holds it.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Part types whose missing text is passed over rather than refused.
_MAY_BE_EMPTY = ("text", "refusal")
BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a line of Claude Code's system prompts that is another one with each request. vLLM removes it from system
messages in some versions and not in others; SGLang (0.5.23) never does."""
CUT: Final = "CUT_AT_THE_FIRST_MEDIUM"
"""Shows how far a chat is rendered in front of that."""
_PLAIN_ROLES = ("system", "user", "assistant")
_TOOL_FIELDS = {"type", "function"}
_FUNCTION_FIELDS = ("name", "description", "parameters")


def has_media(messages: object) -> bool:
    """Whether any message holds more than text, or what may be more."""
    lists = (message.get("content") for message in _dicts(messages))
    return any(not _is_text(part) for parts in lists for part in _dicts(parts))


def cut_at_media(messages: object) -> list[object]:
    """Messages with `CUT` as the whole text of the first that holds media, and of later ones what is text."""
    given: list[object] = messages if isinstance(messages, list) else []
    first = next((at for at, message in enumerate(given) if has_media([message])), len(given))
    later = [{**message, "content": CUT} for message in _dicts(given[first : first + 1])]
    later += [_texts_alone(message) for message in _dicts(given[first + 1 :])]
    return [*given[:first], *later]


def _texts_alone(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": list(filter(_is_text, _dicts(content)))} if has_media([message]) else message


def conversation(messages: object, *, as_parts: bool) -> list[Message]:
    """Messages as vLLM passes them on. `as_parts`: content as a list of parts, else as text joined by line breaks.

    Raises CannotTokenize for media and for what engines or their versions treat differently.
    """
    if not isinstance(messages, list) or not messages:
        raise CannotTokenize("malformed", "messages is not a list with at least one message")
    return [_plain(message, as_parts) or _message(message, as_parts=as_parts) for message in messages]


def tool_definitions(tools: object) -> list[dict[str, Any]] | None:
    """Tools with the fields and the order in which vLLM shows them to templates; raises CannotTokenize.

    A list of none is shown too (0.12), or the request refused (0.22).
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise CannotTokenize("malformed", "tools is not a list")
    return [_tool(tool) for tool in tools]


def _dicts(values: object) -> Iterable[dict[str, Any]]:
    return (value for value in values if isinstance(value, dict)) if isinstance(values, list) else ()


def _plain(message: object, as_parts: bool) -> Message | None:
    """What `_message` makes of the commonest: no more than a role and text. None: it has to look closer."""
    if not isinstance(message, dict) or len(message) != 2 or message.get("role") not in _PLAIN_ROLES:
        return None
    texts = _plain_texts(message.get("content"))
    if not texts or (message["role"] == "system" and any(text.startswith(BILLING_HEADER) for text in texts)):
        return None
    content = [{"type": "text", "text": text} for text in texts] if as_parts else _joined(texts)
    return {"role": message["role"], "content": content}


def _plain_texts(content: object) -> list[str]:
    """Empty for anything but text, or parts that are text and no more."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    plain = (part for part in parts if isinstance(part, dict) and len(part) == 2 and part.get("type") == "text")
    texts = [text for part in plain if isinstance(text := part.get("text"), str)]
    return texts if len(texts) == len(parts) else []


def _message(message: object, *, as_parts: bool) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise CannotTokenize("malformed", "a message is not an object with a role")
    if role == "developer":
        raise CannotTokenize("unsupported", "a developer message, which engines rewrite in different ways")
    texts = _texts(message.get("content"))
    if role == "system" and any(text.startswith(BILLING_HEADER) for text in texts):
        raise CannotTokenize("unsupported", "a system message with a billing header, which some engines remove")
    content: str | list[dict[str, str]]
    if not as_parts:
        content = _joined(texts)
    elif role == "tool":  # text even where the template takes parts; of these none is passed over
        content = "\n".join(texts)
    else:
        content = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": content, **_extra_fields(role, message)}


def _joined(texts: Iterable[str]) -> str:
    """As vLLM does it for templates that take text: without the empty ones, which some clients send."""
    return "\n".join(text for text in texts if text)


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise CannotTokenize("malformed", "a message's content is neither text nor a list of parts")
    return [text for part in content if (text := _part(part)) is not None]


def _part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise CannotTokenize("malformed", "a part of a message's content is not an object")
    if not _is_text(part):
        raise CannotTokenize("multimodal", "a message with a part that is not text")
    kind = part["type"]
    text = part.get(_TEXT_FIELDS[kind])
    if not isinstance(text, str) and not (text is None and kind in _MAY_BE_EMPTY):
        raise CannotTokenize("malformed", "a text part without its text")
    return text


def _is_text(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _TEXT_FIELDS and part.get("uuid") is None


def _extra_fields(role: str, message: Message) -> Message:
    fields: Message = {}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = _tool_calls(calls)
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if role == "tool" and "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    return fields | {key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)}


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence):
        raise CannotTokenize("malformed", "tool_calls is not a list")
    return [_tool_call(call) for call in calls]


def _tool_call(call: object) -> dict[str, Any]:
    """Fields in the order of OpenAI's schema, as vLLM's validation leaves them; templates may show the whole."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise CannotTokenize("malformed", "a tool call that is not a call of a function")
    values = (call.get("id"), call.get("type"), function.get("name"), function.get("arguments"))
    if not all(isinstance(value, str) for value in values):
        raise CannotTokenize("unsupported", "a tool call that lacks id, type, name or arguments as text")
    shown = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    known = {"id": call["id"], "function": shown | _others(function, shown), "type": "function"}
    return known | _others(call, known)


def _others(values: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in known}


def _arguments(text: str) -> dict[str, Any]:
    """Templates expect a mapping; what is none counts as empty."""
    try:
        arguments = uncollected(json.loads, text, len(text))
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise CannotTokenize("malformed", "a tool that is not a function")
    strict = {} if function.get("strict") is None else {"strict": function["strict"]}
    if tool.keys() - _TOOL_FIELDS or function.keys() - {*_FUNCTION_FIELDS, *strict}:
        # Versions differ in whether templates get to see these.
        raise CannotTokenize("unsupported", "a tool with fields beyond name, description, parameters and strict")
    shown = {field: function.get(field) for field in _FUNCTION_FIELDS}
    return {"type": "function", "function": shown | strict}
