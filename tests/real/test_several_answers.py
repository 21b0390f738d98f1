"""A request with several answers (`n`, a batch of prompts) is as many to an engine, and to the books of its worker."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .asking import get
from .eventually import eventually
from .fleet import Engine, EngineKind, Router
from .prompts import ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ANSWER_TOKENS = 600
"""Long enough for the engine to be asked meanwhile; its cache has room for four answers."""
RUNNING: dict[EngineKind, tuple[str, str]] = {
    "vllm": ("/metrics", r"vllm:num_requests_running\{.*\} (\d+)"),
    "sglang": ("/v1/loads", r'"num_running_reqs":\s*(\d+)'),
}


def running(engine: Engine) -> int:
    path, pattern = RUNNING[engine.kind]
    found = re.search(pattern, get(engine.url + path).body.decode())
    assert found
    return int(found[1])


def booked(router: Router, engine: Engine) -> int:
    [worker] = [each for each in get(f"{router.url}/ready").json()["workers"] if each["id"] == engine.worker_id]
    return int(worker["ranks"][0]["requests"])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("about", "answers"),
    [
        ({"prompt": ids("several", 40), "n": 3}, 3),
        ({"prompt": [ids("several", 40), ids("another", 40)], "n": 2}, 4),
    ],
    ids=["n", "batch"],
)
def test_each_answer_counts(
    local_router: Router, request: pytest.FixtureRequest, kind: EngineKind, about: dict[str, Any], answers: int
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    body = {"model": "tiny", "max_tokens": ANSWER_TOKENS, "temperature": 1, "ignore_eos": True, **about}
    eventually(lambda: booked(local_router, engine), lambda count: count == 0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(local_router.ask, body, engine.worker_id)
        eventually(lambda: running(engine), lambda count: count == answers)
        assert booked(local_router, engine) == answers
        assert answer.result().status == 200
    assert len(answer.result().json()["choices"]) == answers
    assert booked(local_router, engine) == 0, "none of them is taken for a foreign request"
