"""The router under test: a child that can be killed, drained and started again on its port, and asked what it knows."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.actors import Actor

DRAIN_SECONDS = 10.0
READ_WITHIN = 0.5
"""Seconds after which a request that was sent has been read, even where a signal to end comes."""


class RouterActor:
    def __init__(self, folder: Path, port: int, flags: list[str]) -> None:
        self._told = folder / "told.json"
        own = ("--port", str(port), "--drain-timeout", str(DRAIN_SECONDS))
        self.actor = Actor("router", folder, "tests.chaos.router_child", str(self._told), *own, *flags)
        self.port = port
        self.up = asyncio.Event()
        """Set while it should answer."""
        self.starts = 0
        self.serves = False
        """It has found a worker since its start."""
        self._kills: list[float] = []
        self._drains: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self.actor.start()
        assert (await self.actor.first_line()).startswith("Listening on ")
        self.starts += 1
        self.up.set()

    async def serving(self, session: aiohttp.ClientSession) -> None:
        """Returns when it is ready."""
        while not self.serves:
            async with session.get(f"{self.url}/ready") as answer:
                self.serves = answer.status == 200
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        self._down()
        self._kills.append(time.monotonic())
        await self.actor.kill()

    async def drain(self) -> int:
        """Its exit status."""
        self._down()
        self._drains.append(time.monotonic())
        self.actor.send(signal.SIGTERM)
        return await self.actor.ended(DRAIN_SECONDS + 5)

    def _down(self) -> None:
        self.up.clear()
        self.serves = False

    def excuses(self, began: float, ended: float) -> bool:
        """Whether a request of that time may have been cut: by a kill, or a drain that it came too late for or
        outlasted."""
        if any(began <= kill <= ended for kill in self._kills):
            return True
        drains = [drain for drain in self._drains if began <= drain <= ended]
        return any(began > drain - READ_WITHIN or ended >= drain + DRAIN_SECONDS for drain in drains)

    async def metrics(self, session: aiohttp.ClientSession) -> Counter[str]:
        """By name, summed over all labels."""
        found: Counter[str] = Counter()
        async with session.get(f"{self.url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if match := re.match(r"(\w+)(?:\{.*\})? (\S+)$", line):
                    found[match[1]] += float(match[2])  # type: ignore[assignment]
        return found

    async def ready(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get(f"{self.url}/ready") as answer:
            workers: list[dict[str, Any]] = (await answer.json(content_type=None))["workers"]
        return workers

    async def tell(self) -> dict[str, Any]:
        """See `router_child`."""
        self._told.unlink(missing_ok=True)
        self.actor.send(signal.SIGUSR1)
        async with asyncio.timeout(10):
            while not self._told.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.02)
        told: dict[str, Any] = json.loads(self._told.read_bytes())
        return told
