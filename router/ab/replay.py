"""Replays a trace open loop: each request is sent at its own time, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import msgspec

from router.ab import client
from router.ab.client import Address, Outcome
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
    timeout: float = 600.0
    """Seconds of wall time a request may take."""


async def replay(
    rows: Sequence[Row],
    targets: Sequence[Address],
    pace: Pace,
    prompts: Prompts,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> list[Record]:
    """Sends the rows to the targets in turn and waits for all answers. Returns a record for each row, in order."""
    dues: list[float] = []
    sending: list[asyncio.Task[Outcome]] = []
    ready, bodies = deque[bytes](), _bodies(rows, prompts)
    await _write_ahead(ready, bodies, until=perf_counter() + 1.0)
    start = perf_counter()
    async with asyncio.TaskGroup() as group:
        for row, target in zip(rows, itertools.cycle(targets), strict=False):
            dues.append(start + pace.wall(row.timestamp - rows[0].timestamp))
            await _write_ahead(ready, bodies, until=dues[-1] - _SPARE)
            await asyncio.sleep(dues[-1] - perf_counter())
            body = ready.popleft() if ready else next(bodies)
            sending.append(group.create_task(_send(target, body, prompts.timeout, on_done)))
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


async def _send(target: Address, body: bytes, timeout: float, on_done: Callable[[Outcome], None]) -> Outcome:
    outcome = await client.send(target, body, timeout)
    outcome.worker = outcome.worker or target.url
    on_done(outcome)
    return outcome
