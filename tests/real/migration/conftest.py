"""Two vLLMs and a router whose streams may go on elsewhere, started once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.conftest import running
from tests.real.fleet import Router
from tests.real.pd.halves import Weighted


@pytest.fixture(scope="session")
def pair(logs: Path) -> Iterator[list[Weighted]]:
    found = [Weighted(name, logs) for name in ("migration-a", "migration-b")]
    with ExitStack() as stack:
        for engine in found:
            stack.callback(engine.process.kill)
            engine.process.start()
        for engine in found:
            engine.wait_until_up()
        yield found


@pytest.fixture(scope="session")
def migrating_router(pair: list[Weighted], logs: Path) -> Iterator[Router]:
    yield from running(Router("router-migration", pair, logs, "--migration-limit", "1"))
