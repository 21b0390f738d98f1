"""What is done once a second for as long as the router serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

logger = logging.getLogger(__name__)

INTERVAL: Final = 1.0
"""Seconds between two rounds."""
LATE: Final = 2.0
"""When a round comes later than this many times `INTERVAL` after the one before, this process itself stood still, and
has not read yet what workers sent meanwhile."""

Chore: TypeAlias = Callable[[float], Awaitable[None] | None]
"""Is told the time, in seconds on a steady clock."""


class Housekeeping:
    """Does each chore in every round, whether or not another fails."""

    def __init__(
        self,
        chores: dict[str, Chore],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`chores`: by name, in the order in which they are done."""
        self._chores = chores
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        at = self._clock()
        while True:
            await self._sleep(INTERVAL)
            if self._clock() - at > LATE * INTERVAL:
                await self._sleep(INTERVAL)  # what workers sent while this process stood still is read first
            at = self._clock()
            for name, chore in self._chores.items():
                await _do(name, chore, at)


async def _do(name: str, chore: Chore, now: float) -> None:
    try:
        begun = chore(now)
        if begun is not None:
            await begun
    except Exception:  # it may fail in each round, and yet the others are to be done
        logger.exception("Housekeeping failed", extra={"fields": {"chore": name}})
