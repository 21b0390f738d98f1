"""What an engine drops, by itself or on request, is no longer predicted."""

from __future__ import annotations

import pytest

from .fleet import Engine, Router, agrees
from .prompts import request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

VLLM, OTHER_VLLM, SGLANG = range(3)


@pytest.mark.parametrize(("holds", "takes_over"), [(VLLM, OTHER_VLLM), (SGLANG, VLLM)], ids=["vllm", "sglang"])
def test_evicted_prefix_moves_elsewhere(router: Router, engines: list[Engine], holds: int, takes_over: int) -> None:
    holder, other, topic = engines[holds], engines[takes_over], f"evict {router} {holds}"
    router.until_known(holder, request("ids", topic, tail="first"))
    assert router.ask(request("ids", topic)).worker == holder.worker_id
    router.fill(holder, topic)
    router.until_known(other, request("ids", topic, tail="first"))
    moved = router.ask(request("ids", topic))
    assert moved.worker == other.worker_id
    assert agrees(moved, other)
    back = router.ask(request("ids", topic, tail="first"), holder.worker_id)
    assert back.reported <= holder.block
    assert agrees(back, holder)


@pytest.mark.parametrize("number", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_reset_empties_the_picture(router: Router, engines: list[Engine], number: int) -> None:
    engine, topic = engines[number], f"reset {router} {number}"
    body = request("ids", topic)
    router.until_known(engine, body)
    engine.reset_cache()
    # vLLM tells of the reset only with its next request.
    router.until_known(engine, request("ids", f"{topic}, afterwards"))
    answer = router.ask(body, engine.worker_id)
    assert (answer.predicted, answer.reported) == (0, 0)
    router.until_known(engine, body)
