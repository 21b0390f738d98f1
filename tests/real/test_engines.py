"""The engines themselves, without the router: what the other tests take for granted."""

from __future__ import annotations

import pytest

from .asking import Answer, ask
from .fleet import CACHE_TOKENS, Engine
from .prompts import KINDS, TOPIC_TOKENS, Kind, filler, request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def directly(engine: Engine, body: dict[str, object]) -> Answer:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return ask(engine.url + path, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_report_what_was_cached(engines: list[Engine], kind: Kind, stream: bool) -> None:
    topic = f"engines {kind} {stream}"
    for engine in engines:
        first = directly(engine, request(kind, topic, stream=stream))
        second = directly(engine, request(kind, topic, stream=stream))
        assert first.reported < engine.block * 4, engine  # a chat's opening is the same for all
        assert second.reported > second.prompt_tokens - 60, engine


def test_evict_and_reset(engines: list[Engine]) -> None:
    for engine in engines:
        body = request("ids", "engines evict")
        directly(engine, body)
        for number in range(5):
            directly(engine, filler(f"engines evict {engine} {number}", CACHE_TOKENS // 4))
        assert directly(engine, body).reported < TOPIC_TOKENS / 2, engine
        assert directly(engine, body).reported >= TOPIC_TOKENS - engine.block, engine
        engine.reset_cache()
        assert directly(engine, body).reported == 0, engine
