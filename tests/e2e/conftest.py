"""A fleet of two for the tests that only ask it things, and a place for logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.children import Sim


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def fleet(logs: Path) -> Iterator[Sim]:
    """Two workers, about 1,700 tokens a second for one request."""
    with Sim("--speedup", "10", log=logs) as sim:
        yield sim
