"""Waiting for what happens in other processes: polls with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_INTERVAL = 0.1


def eventually(look: Callable[[], T], accept: Callable[[T], object] = bool, within: float = 60.0) -> T:
    """The first thing seen that is accepted; fails with the last thing seen."""
    end = time.monotonic() + within
    while True:
        seen = look()
        if accept(seen):
            return seen
        if time.monotonic() >= end:
            raise AssertionError(f"not within {within:g} s; last seen: {seen!r}")
        time.sleep(POLL_INTERVAL)
