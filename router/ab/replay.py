"""Replays a trace open loop: each request is sent at its own time, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from time import perf_counter

import msgspec

from router.ab.client import Outcome
from router.ab.prompts import completion_body
from router.ab.statistics import Record, record
from router.ab.trace import Row

_AHEAD = 64
"""Bodies prepared in advance (5 MB), since traces have bursts and preparing one takes about a millisecond."""
_SPARE = 0.005
"""Seconds before a request is due in which no further body is prepared."""


class Pace(msgspec.Struct, frozen=True):
    """Maps trace time to wall time, for `rate` times the trace's rate on a fleet `speedup` times real time."""

    rate: float = 1.0
    speedup: float = 1.0

    def wall(self, timestamp: float) -> float:
        """Seconds of wall time for a timestamp in ms."""
        return timestamp / 1000 / self.rate / self.speedup


class Prompts(msgspec.Struct, frozen=True):
    """What all requests have in common."""

    model: str
    seed: int = 0


Send = Callable[[bytes], Coroutine[None, None, Outcome]]
"""Sends the body of a completion request, and waits for the whole answer."""


async def replay(
    rows: Sequence[Row],
    sends: Sequence[Send],
    pace: Pace,
    prompts: Prompts,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> list[Record]:
    """Sends the rows by each of `sends` in turn and waits for all answers. Returns a record for each row, in order."""
    dues: list[float] = []
    sending: list[asyncio.Task[Outcome]] = []
    ready, bodies = deque[bytes](), _bodies(rows, prompts)
    await _write_ahead(ready, bodies, until=perf_counter() + 1.0)
    start = perf_counter()
    async with asyncio.TaskGroup() as group:
        for row, send in zip(rows, itertools.cycle(sends), strict=False):
            dues.append(start + pace.wall(row.timestamp - rows[0].timestamp))
            await _write_ahead(ready, bodies, until=dues[-1] - _SPARE)
            await asyncio.sleep(dues[-1] - perf_counter())
            body = ready.popleft() if ready else next(bodies)
            sending.append(group.create_task(_send(send, body, on_done)))
    outcomes = [task.result() for task in sending]
    return [
        record(index, due, outcome, start, pace.speedup)
        for index, (due, outcome) in enumerate(zip(dues, outcomes, strict=True))
    ]


def _bodies(rows: Sequence[Row], prompts: Prompts) -> Iterator[bytes]:
    return (completion_body(row, prompts.model, prompts.seed) for row in rows)


async def _write_ahead(ready: deque[bytes], bodies: Iterator[bytes], until: float) -> None:
    """Prepares bodies while there is time; between any two the event loop reads the sockets."""
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
