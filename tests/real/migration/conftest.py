"""Two vLLMs and a router whose streams may go on elsewhere, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.conftest import running, serving
from tests.real.fleet import Router
from tests.real.pd.halves import Weighted


@pytest.fixture(scope="session")
def pair(logs: Path) -> Iterator[list[Weighted]]:
    yield from serving([Weighted(name, logs) for name in ("migration-a", "migration-b")])


@pytest.fixture(scope="session")
def migrating_router(pair: list[Weighted], logs: Path) -> Iterator[Router]:
    yield from running(Router("router-migration", pair, logs, "--migration-limit", "1"))
