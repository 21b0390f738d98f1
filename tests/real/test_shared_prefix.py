"""A prompt goes to the worker that holds its beginning, and the router knows how much of it that is.

With text and chats this also shows that the router makes the same tokens as the engines."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import PREFIX_DECIDES, running
from .fleet import Engine, Nats, Router, agrees
from .prompts import KINDS, PREFIX_LEAST, Kind, request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_to_its_holder(router: Router, engines: list[Engine], kind: Kind, stream: bool) -> None:
    topics = {engine: f"shared {router} {kind} {stream} {engine}" for engine in engines}
    for engine, topic in topics.items():
        router.until_known(engine, request(kind, topic, stream=stream))
    for engine, topic in topics.items():
        assert_goes_to(router, engine, request(kind, topic, stream=stream))


def test_conversation_stays_known(router: Router, engines: list[Engine]) -> None:
    """Each turn repeats all before it, the engine's own words too: what was generated is cached as well."""
    for engine in engines:
        body = request("chat", f"conversation {router} {engine}") | {"max_tokens": 40}
        known = router.until_known(engine, body)
        for turn in range(3):
            said = known.json()["choices"][0]["message"]["content"]
            more = [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then? {turn}"}]
            body |= {"messages": [*body["messages"], *more]}
            answer = router.ask(body, engine.worker_id)
            assert agrees(answer, engine), (engine, answer.predicted, answer.reported)
            assert answer.reported >= known.prompt_tokens - 2 * engine.block
            known = router.until_known(engine, body, known.prompt_tokens)


@pytest.mark.parametrize("plane", ["local", "nats"])
def test_router_that_starts_late_learns_what_is_cached(
    plane: str, local_router: Router, nats_router: Router, nats: Nats, engines: list[Engine], logs: Path
) -> None:
    topics = {engine: f"late {plane} {engine}" for engine in engines}
    for engine, topic in topics.items():
        local_router.until_known(engine, request("ids", topic))
    args = ["--event-plane", nats.url] if plane == "nats" else []
    with contextmanager(running)(Router(f"router-late-{plane}", engines, logs, *PREFIX_DECIDES, *args)) as late:
        for engine, topic in topics.items():
            late.until_known(engine, request("ids", topic, tail="the same"))
            assert_goes_to(late, engine, request("ids", topic))


def assert_goes_to(router: Router, engine: Engine, body: dict[str, object]) -> None:
    answer = router.ask(body)
    assert answer.status == 200, answer
    assert answer.worker == engine.worker_id, engine
    assert answer.reported >= PREFIX_LEAST, engine
    assert agrees(answer, engine), (engine, answer.predicted, answer.reported)
