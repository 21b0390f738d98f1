"""Anthropic's messages and OpenAI's responses: real engines render them in ways of their own, and yet a conversation
goes on where it was, and finds there what was computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from .asking import Answer, ask, get
from .fleet import Engine, Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

APIS: Mapping[str, tuple[str, str, str]] = {
    "/v1/messages": ("system", "messages", "max_tokens"),
    "/v1/responses": ("instructions", "input", "max_output_tokens"),
}
WORDS = "Read each file before you change it, and say afterwards what you have changed and why. " * 30
"""A thousand tokens: a short prompt goes to whoever seems a little quicker."""


def conversation(path: str, topic: str, *said: str) -> dict[str, Any]:
    system, messages, limit = APIS[path]
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return {"model": "tiny", system: f"{topic}. {WORDS}", messages: turns, limit: 8, "temperature": 0}


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


def test_a_kept_response_is_found_where_it_is(local_router: Router, nats_router: Router, engines: list[Engine]) -> None:
    """By the router that passed it on, and by another that has never heard of it."""
    for engine in engines:
        pinned = {"X-Router-Target-Worker": engine.worker_id}
        body = conversation("/v1/responses", f"{engine} keeps this", "Begin.")
        first = ask(f"{local_router.url}/v1/responses", body, headers=pinned)
        assert first.status == 200, first
        named = first.json()["id"]
        for router in (local_router, nats_router):
            url = f"{router.url}/v1/responses"
            shown = get(f"{url}/{named}")
            assert (shown.status, shown.worker, shown.json()["id"]) == (200, engine.worker_id, named)
            onward = ask(url, {**conversation("/v1/responses", "", "Go on."), "previous_response_id": named})
            assert (onward.status, onward.worker) == (200, engine.worker_id), onward
            assert onward.json()["usage"]["input_tokens"] > first.json()["usage"]["input_tokens"] - 8
