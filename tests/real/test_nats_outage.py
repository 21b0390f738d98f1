"""The event plane goes away and comes back; requests are served meanwhile, and what was missed is caught up."""

from __future__ import annotations

import pytest

from .fleet import FILLER_TOKENS, FILLERS, Engine, Nats, Router, agrees
from .prompts import filler, request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_nats_server_restarts(nats_router: Router, nats: Nats, engines: list[Engine], vllm: Engine) -> None:
    router = nats_router
    before = [request("ids", f"outage, before {number}") for number in range(8)]
    during = {e: request("ids", f"outage, during {e}") for e in engines}
    for body in before:
        router.until_known(vllm, body)
    nats.process.stop()
    try:
        for number in range(FILLERS):
            assert router.ask(filler(f"outage {number}", FILLER_TOKENS), vllm.worker_id).status == 200
        for engine, body in during.items():
            assert router.ask(body, engine.worker_id).status == 200
            assert router.ask(request("ids", "outage, anywhere")).status == 200
    finally:
        nats.start()
    for engine, body in during.items():
        router.until_known(engine, body)
    # What was sent a moment ago is predicted, whatever was heard of it: that the plane has caught up shows in prompts
    # that were evicted meanwhile, each asked once.
    evicted = [router.ask(body, vllm.worker_id) for body in before]
    assert all(answer.reported <= vllm.block for answer in evicted)
    assert agrees(evicted[-1], vllm)
