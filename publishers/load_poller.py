"""Polls an engine for its load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from engines.description import EngineDescription
from engines.load import poll
from engines.rank_load import RankLoad
from publishers.dialogue import converse
from publishers.logs import log_event
from publishers.reasons import LATE
from publishers.turns import until_turn

logger = logging.getLogger(__name__)

INTERVAL = 1.0
TIMEOUT = 2.0
"""Seconds for one request. Reports must not wait long for figures: they also say which batch was the last."""

LONGEST_WAIT = 4.0
"""Seconds between two polls of an engine that is gone, at most: a thousand would take half a core. That it is back is
noticed no later."""

MOST_SILENT = 30
"""Rounds in a row in which an engine answers without figures, after which it is asked again what it is."""

OnLoad = Callable[[dict[int, RankLoad]], None]
"""Called every interval with the load by dp rank, without ranks of which the engine said nothing."""


class LoadCounts(msgspec.Struct):
    """Totals."""

    polls: int = 0
    failures: int = 0
    """Polls that brought no figures."""


class LoadPoller:
    """Asks the engine at `url` every `interval` seconds; less often, while it cannot be reached."""

    def __init__(
        self,
        url: str,
        description: EngineDescription,
        session: aiohttp.ClientSession,
        on_load: OnLoad,
        interval: float = INTERVAL,
        counts: LoadCounts | None = None,
    ) -> None:
        """`counts`: to add to."""
        self.counts = counts or LoadCounts()
        self._url = url
        self._description = description
        self._session = session
        self._on_load = on_load
        self._interval = interval
        self._failing = False
        self._away = False
        """Whether the last round brought no figures because a request was not answered."""
        self._pace = 1
        """Intervals from one poll to the next."""
        self._left = 0
        """Intervals that pass without a poll until the next."""

    async def until_back(self, suspected: Callable[[], bool] = lambda: False) -> None:
        """Polls, and returns once the engine may have been replaced by another, which is so when
        - it tells its load, or answers at all, after it did not;
        - it tells its load while a replacement is `suspected`: one may be over between two polls; or
        - it answers, but has told no load for `MOST_SILENT` rounds, in which no restart would be noticed."""
        silent = 0
        while True:
            was_failing, was_away = self._failing, self._away
            await self.once()
            silent = silent + 1 if self._failing and not self._away else 0
            back = (was_failing and not self._failing) or (was_away and not self._away)
            if back or silent == MOST_SILENT or (not self._failing and suspected()):
                return
            await self._wait()

    def look_again(self) -> None:
        """Polls at the next interval, since the engine may be back."""
        self._pace, self._left = 1, 0

    async def _wait(self) -> None:
        """Until the next poll. Meanwhile reports go on: they also say which batch was the last."""
        while True:
            await asyncio.sleep(until_turn(self._url, self._interval, asyncio.get_running_loop().time()))
            if self._left <= 0:
                return
            self._left -= 1
            self._on_load({})

    async def once(self) -> None:
        loads, trouble = await converse(poll(self._description), self._session, self._url, TIMEOUT)
        self.counts.polls += 1
        self.counts.failures += not loads
        was_away, self._away = self._away, bool(trouble) and not loads
        gone = self._away and LATE not in trouble  # a busy engine may answer late, and its load counts
        self._pace = min(self._pace * 2, max(1, int(LONGEST_WAIT / self._interval))) if gone and was_away else 1
        self._left = self._pace - 1
        self._say(not loads, trouble)
        self._on_load(loads)

    def _say(self, failing: bool, trouble: str) -> None:
        if failing == self._failing:
            return
        self._failing = failing
        if failing:
            why = {"trouble": trouble} if trouble else {}
            log_event(logger, logging.WARNING, "The engine does not report its load", engine=self._url, **why)
        else:
            log_event(logger, logging.INFO, "The engine reports its load again", engine=self._url)
