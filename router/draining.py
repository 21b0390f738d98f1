"""How a router ends: what runs may end within a time, and the rest is cut off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from publishers.logs import log_event
from router.http.front import Connection
from router.proxy.exchange import Exchange

logger = logging.getLogger("router")

_CUT_OFF_GRACE = 1.0
"""Seconds that clients have to take the end of an answer that was cut off; most have it at once."""


class Draining:
    def __init__(self, connections: Collection[Connection]) -> None:
        """`connections`: those that are open at any moment."""
        self._connections = connections
        self.exchanges: Collection[Exchange] = ()
        """Those that are under way at any moment."""

    @property
    def busy(self) -> int:
        """Requests being served."""
        return sum(connection.busy for connection in self._connections)

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in list(self._connections):
            connection.abort()

    async def drain(self, timeout: float) -> None:
        """Let running requests end, and cut off those that outlast `timeout` seconds. Nothing new is accepted by
        now."""
        for connection in list(self._connections):
            connection.drain()
        if self.busy:
            log_event(logger, logging.INFO, "Draining", in_flight=self.busy, timeout=timeout)
        await self._idle_within(timeout)
        if self.busy:
            await self._cut_off(timeout)
        self.abort()

    async def _cut_off(self, timeout: float) -> None:
        log_event(logger, logging.WARNING, "Requests outlast the drain timeout", cut_off=self.busy)
        for connection in list(self._connections):
            connection.drain()  # what is not here whole by now is not waited for
        reason = f"The router is stopping, and waited {timeout:g} s for the request to end (--drain-timeout)."
        for exchange in list(self.exchanges):
            exchange.stop(503, reason)
        await self._idle_within(_CUT_OFF_GRACE)

    async def _idle_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.busy and time.monotonic() < deadline:  # noqa: ASYNC110 -- an event would need counting per request
            await asyncio.sleep(0.02)
