"""vLLM with KV offloading: what it moved to CPU memory is predicted too."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from .asking import get
from .conftest import running, serving
from .fleet import Engine, Router, predictions
from .prompts import conversations

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

GIBIBYTES = 0.01
"""Some 300 blocks beside 128 in the engine's own memory: prompts push each other out of both."""
CONNECTOR = {
    "kv_role": "kv_both",
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"spec_name": "HostCopies", "spec_module_path": "tests.real.host_copies"},
}
REQUESTS = 120


@pytest.fixture(scope="module")
def offloading(logs: Path) -> Iterator[Engine]:
    flags = ("--kv-offloading-size", str(GIBIBYTES), "--kv-transfer-config", json.dumps(CONNECTOR))
    for [engine] in serving([Engine("vllm", "offloading", logs, *flags)]):
        yield engine


@pytest.fixture(scope="module")
def router(offloading: Engine, logs: Path) -> Iterator[Router]:
    yield from running(Router("router-offloading", [offloading], logs))


def test_what_is_predicted_is_found(router: Router, offloading: Engine) -> None:
    predicted, wrong = predictions(router, offloading, conversations(random.Random(7), REQUESTS))
    assert predicted > 250 * REQUESTS
    assert len(wrong) <= REQUESTS // 20, wrong  # by the engine's own memory alone a third is
    [worker] = get(f"{router.url}/ready").json()["workers"]
    assert worker["ranks"][0]["blocks"]["cpu"] > worker["ranks"][0]["blocks"]["gpu"]
