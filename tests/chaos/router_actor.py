"""The router under test: a child that can be killed, drained and started again on its port, and asked what it knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.actors import Actor

DRAIN_SECONDS = 10.0
REPLACED_WITHIN = 20.0
"""Seconds in which there is another process for one that was killed."""
DIES_WITHIN = 0.5
"""Seconds in which one of several that was killed may still be given connections by the kernel."""
READ_WITHIN = 0.5
"""Seconds after which a request that was sent has been read, even where a signal to end comes."""


class RouterActor:
    def __init__(self, folder: Path, port: int, flags: list[str], processes: int = 1) -> None:
        self._told = folder / "told.json"
        own = ("--port", str(port), "--drain-timeout", str(DRAIN_SECONDS), "--processes", str(processes))
        module = ("tests.chaos.router_child", str(self._told)) if processes == 1 else ("router",)
        self.actor = Actor("router", folder, *module, *own, *flags)
        self.port = port
        self.processes = processes
        self.up = asyncio.Event()
        """Set while it should answer."""
        self.starts = 0
        """Of it, and of any of its processes."""
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

    async def kill_process(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        """Any of several. Returns when there is another in its place."""
        self._kills.append(time.monotonic())
        self.starts += 1  # clients connect anew, as whoever sees a connection end
        os.kill(draw.choice(self.actor.children), signal.SIGKILL)
        async with asyncio.timeout(REPLACED_WITHIN):
            heard = 0
            while heard < self.processes:
                await asyncio.sleep(0.1)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    heard = len(await self.indexed(session))

    def _down(self) -> None:
        self.up.clear()
        self.serves = False

    def excuses(self, began: float, ended: float) -> bool:
        """Whether a request of that time may have been cut: by a kill, or a drain that it came too late for or
        outlasted."""
        if any(began - DIES_WITHIN <= kill <= ended for kill in self._kills):
            return True
        drains = [drain for drain in self._drains if began <= drain <= ended]
        return any(began > drain - READ_WITHIN or ended >= drain + DRAIN_SECONDS for drain in drains)

    async def metrics(self, session: aiohttp.ClientSession) -> Counter[str]:
        """By name, summed over all labels."""
        found: Counter[str] = Counter()
        for name, _, value in await self._samples(session):
            found[name] += value  # type: ignore[assignment]
        return found

    async def indexed(self, session: aiohttp.ClientSession) -> dict[str, dict[str, int]]:
        """Of each process that answers, by its number: how many blocks it knows on workers' GPUs."""
        found: dict[str, dict[str, int]] = {}
        for name, labels, value in await self._samples(session):
            if name == "router_index_blocks" and labels["tier"] == "gpu":
                found.setdefault(labels["process"], {})[labels["worker"]] = int(value)
        return found

    async def _samples(self, session: aiohttp.ClientSession) -> list[tuple[str, dict[str, str], float]]:
        async with session.get(f"{self.url}/metrics") as answer:
            page = await answer.text()
        found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE)
        return [(name, dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value)) for name, labels, value in found]

    async def ready(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        async with session.get(f"{self.url}/ready") as answer:
            workers: list[dict[str, Any]] = (await answer.json(content_type=None))["workers"]
        return workers

    async def tell(self) -> dict[str, Any]:
        """See `router_child`."""
        self._told.unlink(missing_ok=True)
        self.actor.send(signal.SIGUSR1)
        async with asyncio.timeout(30):
            while not self._told.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.02)
        told: dict[str, Any] = json.loads(self._told.read_bytes())
        return told
