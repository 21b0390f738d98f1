"""`--send-token-ids` before real vLLM: answered as the text is, and the engine takes the ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .asking import Answer, ask, get
from .conftest import PREFIX_DECIDES, running
from .fleet import Engine, Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Naïve café, 日本 🙂?\n"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "completion": {"prompt": "The quick brown fox jumps over the lazy dog, twice."},
    "chat": {"messages": CHAT},
    "chat with a tool": {"messages": CHAT, "tools": [TOOL], "tool_choice": "none"},
}


@pytest.fixture(scope="module")
def sending_router(engines: list[Engine], logs: Path) -> Iterator[Router]:
    yield from running(Router("router-ids", engines[:2], logs, *PREFIX_DECIDES, "--send-token-ids"))


def sent(router: Router) -> float:
    lines = get(f"{router.url}/metrics").body.decode().splitlines()
    (line,) = (line for line in lines if line.startswith("router_token_ids_sent_requests_total"))
    return float(line.split()[1])


def shown(answer: Answer) -> tuple[int, int, list[int]]:
    return answer.status, answer.prompt_tokens, answer.token_ids


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_that_to_the_text(sending_router: Router, vllm: Engine, kind: str, stream: bool) -> None:
    asked = {"model": "tiny", **BODIES[kind], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    before = sent(sending_router)
    with_ids, with_text = sending_router.ask(asked), ask(vllm.url + path, asked)
    assert sent(sending_router) == before + 1
    assert with_ids.status == 200
    assert shown(with_ids) == shown(with_text)


def test_the_same_conversation_is_found_in_the_cache(sending_router: Router) -> None:
    """What was computed from ids is known by the hashes that its text has."""
    said = [{"role": "user", "content": "Once more, please. " * 60}, {"role": "assistant", "content": "Yes."}]
    first = sending_router.ask({"model": "tiny", "messages": said[:1], "max_tokens": 2})
    again = sending_router.ask({"model": "tiny", "messages": [*said, said[0]], "max_tokens": 2})
    assert (first.status, again.status, again.worker) == (200, 200, first.worker)
    assert again.predicted >= 32
    assert again.reported >= 32


def test_where_an_engine_does_not_take_ids_it_gets_the_text(local_router: Router, sglang: Engine, logs: Path) -> None:
    for router in running(Router("router-no-ids", [sglang], logs, "--send-token-ids")):
        assert router.ask({"model": "tiny", "messages": CHAT, "max_tokens": 2}).status == 200
        assert sent(router) == 0
        assert "Prompts go as text" in router.process.output()
