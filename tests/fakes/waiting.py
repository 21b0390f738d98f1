"""Waiting for what has no event to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Returns once `condition()` holds; TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - the state belongs to code that announces no change
            await asyncio.sleep(0.001)
