"""Workers that die and come back, and one that joins and leaves, while requests go on."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

from tests.soak.fleet import Fleet

AFTERMATH = 5.0
"""Seconds after a death in which requests may still suffer from it: the router looks at workers every other second."""


class Churn:
    """From `start` to `stop`, after which every engine runs and the spare one has left."""

    def __init__(self, fleet: Fleet, every: float, draw: random.Random) -> None:
        """`every`: seconds between two deaths."""
        self.deaths: list[float] = []
        self.joins = 0
        self._fleet = fleet
        self._every = every
        self._draw = draw
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._kill()), asyncio.create_task(self._come_and_go())]

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)

    def explains(self, began: float, ended: float) -> bool:
        """Whether a request of that time may have suffered."""
        return any(began - AFTERMATH <= death <= ended for death in reversed(self.deaths))

    async def _kill(self) -> None:
        while not await self._pause(self._every):
            engine = self._draw.choice(self._fleet.engines)
            self.deaths.append(time.monotonic())
            await engine.actor.kill()
            await engine.start()

    async def _come_and_go(self) -> None:
        for number in itertools.count():
            name = f"spare-{number}"
            if await self._pause(self._every):
                return
            await self._fleet.join(name)
            self.joins += 1
            await self._pause(self._every)
            await self._fleet.leave(name)
            while await self._fleet.is_here(name):  # noqa: ASYNC110 -- another process says it
                await asyncio.sleep(0.2)

    async def _pause(self, seconds: float) -> bool:
        """Whether to stop."""
        try:
            async with asyncio.timeout(seconds):
                return await self._stopped.wait()
        except TimeoutError:
            return False
