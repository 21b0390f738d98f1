"""One stage for all tests; each says whom it needs there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .halves import Stage


@pytest.fixture(scope="session")
def stage(logs: Path) -> Iterator[Stage]:
    found = Stage(logs)
    try:
        yield found
    finally:
        found.end()
