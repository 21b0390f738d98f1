"""Tasks end, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio

from publishers.ending import end_tasks


async def stubborn(times: int) -> None:
    """Takes so many cancellations for something else."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


async def failing() -> None:
    raise ValueError


async def test_all_end() -> None:
    tasks = [asyncio.create_task(stubborn(times)) for times in range(4)]
    tasks.append(asyncio.create_task(failing()))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end_tasks(tasks, again=0.0)
    assert all(task.done() for task in tasks)


async def test_there_may_be_nothing_to_end() -> None:
    await end_tasks([])
