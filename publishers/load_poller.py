"""An engine's load, asked for again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from engines.description import EngineDescription
from engines.load import RankLoad, poll
from publishers.dialogue import converse
from publishers.logs import log_event

logger = logging.getLogger(__name__)

INTERVAL = 1.0
TIMEOUT = 2.0
"""Seconds for one request. Reports must not wait long for figures: they also say which batch was the last."""

MOST_SILENT = 30
"""Rounds in a row in which an engine that answers tells no figures, until it is asked anew what it is."""

OnLoad = Callable[[dict[int, RankLoad]], None]
"""Told after every round what was found, by dp rank; nothing for ranks that the engine said nothing of."""


class LoadCounts(msgspec.Struct):
    """Totals."""

    polls: int = 0
    failures: int = 0
    """Polls that brought no figures."""


class LoadPoller:
    """Asks the engine at `url` every `interval` seconds."""

    def __init__(
        self,
        url: str,
        description: EngineDescription,
        session: aiohttp.ClientSession,
        on_load: OnLoad,
        interval: float = INTERVAL,
        counts: LoadCounts | None = None,
    ) -> None:
        """`counts`: to go on with."""
        self.counts = counts or LoadCounts()
        self._url = url
        self._description = description
        self._session = session
        self._on_load = on_load
        self._interval = interval
        self._failing = False
        self._away = False
        """It told nothing, and not all that was asked was answered."""

    async def until_back(self) -> None:
        """Returns once the engine may be another than it was: it tells its load, or answers at all, after it did not;
        or it has told none for a while, so that nobody would see when it is started anew."""
        silent = 0
        while True:
            was_failing, was_away = self._failing, self._away
            await self.once()
            silent = silent + 1 if self._failing and not self._away else 0
            back = (was_failing and not self._failing) or (was_away and not self._away)
            if back or silent == MOST_SILENT:
                return
            await asyncio.sleep(self._interval)

    async def once(self) -> None:
        loads, trouble = await converse(poll(self._description), self._session, self._url, TIMEOUT)
        self.counts.polls += 1
        self.counts.failures += not loads
        self._away = bool(trouble) and not loads
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
