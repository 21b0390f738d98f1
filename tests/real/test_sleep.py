"""A vLLM engine that is put to sleep answers /health all the same."""

from __future__ import annotations

import pytest

from .asking import ask
from .eventually import eventually
from .fleet import Engine, Router
from .prompts import request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_it_gets_nothing_until_it_is_awake(router: Router, vllm: Engine) -> None:
    body = request("ids", f"sleep {router}")
    router.until_known(vllm, body)
    assert ask(f"{vllm.url}/sleep?level=0").status == 200  # pauses, and keeps weights and cache
    try:
        eventually(lambda: router.state(vllm)["up"], lambda up: not up)
        elsewhere = router.ask(body)
        assert elsewhere.status == 200
        assert elsewhere.worker != vllm.worker_id
    finally:
        assert ask(f"{vllm.url}/wake_up").status == 200
    router.until_all_are_up()
    router.until_known(vllm, body)
