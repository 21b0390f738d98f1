"""Ends tasks for good.

A cancellation that meets a time limit of the task's own may be taken for that, and the task goes on: a router in front
of hundreds of addresses at which nobody answered was seen to wait for ever for one that it had cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

AGAIN: Final = 1.0
"""Seconds after which a task that has not ended is cancelled again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again: float = AGAIN) -> None:
    """Cancels the tasks, as often as it takes, and returns when all have ended, however they did."""
    ended = set(tasks)
    left = {task for task in ended if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again)
    await asyncio.gather(*ended, return_exceptions=True)  # else asyncio would log what was raised
