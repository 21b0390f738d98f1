"""What a client makes of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """Of one stream, event by event."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] | None = None
    usage: dict[str, Any] | None = None
    roles: int = 0
    ends: int = 0
    reasons: list[str] = field(default_factory=list)
    names: set[tuple[Any, ...]] = field(default_factory=set)
    errors: list[Any] = field(default_factory=list)


def seen(content: bytes) -> Seen:
    """`content`: without chunks."""
    found = Seen()
    assert content.endswith(b"\n\n") or not content
    for event in content.replace(b"\nevent: error\n\n", b"\n\n").split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ")
        assert not found.ends
        if event == b"data: [DONE]":
            found.ends += 1
        else:
            _add(found, json.loads(event[6:]))
    return found


def _add(found: Seen, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        found.errors.append(chunk["error"])
        return
    found.names.add(tuple(chunk[name] for name in ("id", "object", "created", "model")))
    _take_prompt(found, chunk)
    if chunk.get("usage"):
        found.usage = {name: count for name, count in chunk["usage"].items() if name.endswith("_tokens")}
    for choice in chunk["choices"]:
        _take_prompt(found, choice)
        delta = choice.get("delta", {})
        found.roles += "role" in delta
        found.text += choice["text"] if "text" in choice else delta.get("content") or ""
        found.tokens += choice.get("token_ids") or []
        found.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []


def _take_prompt(found: Seen, fields: dict[str, Any]) -> None:
    if fields.get("prompt_token_ids") is not None:
        assert found.prompt is None
        found.prompt = fields["prompt_token_ids"]
