"""A hybrid model with KV offloading: what its windows have in CPU memory is predicted, and what they lack is not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import running, serving
from .fleet import Engine, Router, predictions
from .prompts import conversations
from .test_hybrid import BLOCKS, GEMMA
from .test_offloading import CONNECTOR

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

GIBIBYTES = 0.03
"""Room for more than the engine's own memory, in which prompts push each other out."""
REQUESTS = 120


@pytest.fixture(scope="module")
def engine(logs: Path) -> Iterator[Engine]:
    model = ("--hf-overrides", json.dumps(GEMMA), "--num-gpu-blocks-override", BLOCKS)
    flags = ("--kv-offloading-size", str(GIBIBYTES), "--kv-transfer-config", json.dumps(CONNECTOR))
    for [engine] in serving([Engine("vllm", "hybrid-offloading", logs, *model, *flags)]):
        yield engine


@pytest.fixture(scope="module")
def router(engine: Engine, logs: Path) -> Iterator[Router]:
    yield from running(Router("router-hybrid-offloading", [engine], logs))


def test_what_is_predicted_is_found(router: Router, engine: Engine) -> None:
    predicted, wrong = predictions(router, engine, conversations(random.Random(7), REQUESTS))
    assert predicted > 250 * REQUESTS
    assert len(wrong) <= REQUESTS // 20, wrong  # by what full attention has in CPU memory alone a quarter is
