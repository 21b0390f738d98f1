"""Replays rows open loop, as router.ab.replay does, through whatever sends: a client, or one that asks first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from time import perf_counter

from router.ab.client import Outcome
from router.ab.prompts import completion_body
from router.ab.replay import Pace, Prompts
from router.ab.statistics import Record, record
from router.ab.trace import Row

Send = Callable[[bytes], Coroutine[None, None, Outcome]]

_AHEAD, _SPARE = 64, 0.005
"""Bodies written before they are due, and seconds before a departure in which none is begun: as in router.ab.replay."""


async def replay(
    rows: Sequence[Row], send: Send, pace: Pace, prompts: Prompts, on_done: Callable[[Outcome], None]
) -> list[Record]:
    """Every request leaves at its own time. One record per row, in the rows' order."""
    bodies = (completion_body(row, prompts.model, prompts.seed) for row in rows)
    ready, sending = deque[bytes](), list[asyncio.Task[Outcome]]()
    await _write_ahead(ready, bodies, until=perf_counter() + 1.0)
    start = perf_counter()
    dues = [start + pace.wall(row.timestamp - rows[0].timestamp) for row in rows]
    async with asyncio.TaskGroup() as group:
        for due in dues:
            await _write_ahead(ready, bodies, until=due - _SPARE)
            await asyncio.sleep(due - perf_counter())
            sending.append(group.create_task(_send(send, ready.popleft() if ready else next(bodies), on_done)))
    ended = enumerate(zip(dues, (task.result() for task in sending), strict=True))
    return [record(index, due, outcome, start, pace.speedup) for index, (due, outcome) in ended]


async def _write_ahead(ready: deque[bytes], bodies: Iterator[bytes], until: float) -> None:
    while len(ready) < _AHEAD and perf_counter() < until:
        body = next(bodies, None)
        if body is None:
            return
        ready.append(body)
        await asyncio.sleep(0)


async def _send(send: Send, body: bytes, on_done: Callable[[Outcome], None]) -> Outcome:
    outcome = await send(body)
    on_done(outcome)
    return outcome
