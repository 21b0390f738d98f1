"""Waiting for what has no event to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


async def until(condition: Callable[[], object], timeout: float = 60) -> None:
    """Returns once `condition()` holds; TimeoutError after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - the state belongs to code that announces no change
            await asyncio.sleep(0.001)


class Turns:
    """How often other work had its turn."""

    def __init__(self) -> None:
        self.taken = 0


@contextmanager
def other_work() -> Iterator[Turns]:
    """Meanwhile other work takes every turn that it gets."""
    turns = Turns()

    async def take() -> None:
        while True:
            turns.taken += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take())
    try:
        yield turns
    finally:
        task.cancel()
