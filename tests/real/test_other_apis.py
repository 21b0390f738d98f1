"""Anthropic's messages and OpenAI's responses: real engines render them in ways of their own, and yet a conversation
goes on where it was, and finds there what was computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from .asking import Answer, ask
from .fleet import Engine, Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

APIS: Mapping[str, tuple[str, str, str]] = {
    "/v1/messages": ("system", "messages", "max_tokens"),
    "/v1/responses": ("instructions", "input", "max_output_tokens"),
}
WORDS = "Read each file before you change it, and say afterwards what you have changed and why. "


def conversation(path: str, topic: str, *said: str) -> dict[str, Any]:
    system, messages, limit = APIS[path]
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return {"model": "tiny", system: f"{topic}. {WORDS * 6}", messages: turns, limit: 8, "temperature": 0}


def cached(answer: Answer) -> int:
    usage = answer.json()["usage"]
    found = usage.get("cache_read_input_tokens") or (usage.get("input_tokens_details") or {}).get("cached_tokens")
    return found or 0


@pytest.mark.parametrize("path", APIS)
def test_conversation_goes_on_where_it_was(local_router: Router, engines: list[Engine], path: str) -> None:
    url = local_router.url + path
    for engine in engines:
        topic = f"{engine} {path}"
        pinned = {"X-Router-Target-Worker": engine.worker_id}
        first = ask(url, conversation(path, topic, "Begin."), headers=pinned)
        assert (first.status, first.worker) == (200, engine.worker_id), first
        again = ask(url, conversation(path, topic, "Begin.", "I have begun.", "Go on."))
        assert (again.status, again.worker) == (200, engine.worker_id), again
        assert again.predicted > 100
        assert cached(again) > 100
