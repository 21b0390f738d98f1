"""The processes of a soak: simulated engines, a worker that answers at once (for the probe), the router, the probe."""

from __future__ import annotations

import contextlib
import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from tests.chaos.actors import Actor, free_ports
from tests.chaos.fleet import GONE, PORTS
from tests.chaos.router_actor import RouterActor

SIM = ("--workers", "1", "--speedup", "20", "--max-model-len", "8192", "--cache-tokens", "65536", "--block-size", "4")
INDEX_MEMORY = "1MiB"
"""Less than what the engines hold in blocks of 4, so that the index forgets all the time."""
ROUTER = ("--router-mode", "kv", "--index-max-memory", INDEX_MEMORY, "--log-level", "warning")


class Engine:
    """One simulated engine on a port that stays its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.port = free_ports(PORTS)
        self.actor = Actor(name, folder, "engines.sim", "--port", str(self.port), *SIM)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self.actor.start()
        await self.actor.first_line()


class Fleet:
    """`async with Fleet(…) as fleet`: all run."""

    def __init__(self, folder: Path, engines: int) -> None:
        self.engines = [Engine(f"w{number}", folder) for number in range(engines)]
        self.spare = Engine("spare", folder)
        """Not the router's from the start: it joins and leaves by the admin API."""
        self.router: RouterActor
        self.probe: Actor
        """To be started when there is something to measure."""
        self.session: aiohttp.ClientSession
        self._admin = f"http://127.0.0.1:{free_ports((0,))}"
        self._folder = folder
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            self.session = await opening.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)))
            for engine in (*self.engines, self.spare):
                opening.push_async_callback(engine.actor.close)
                await engine.start()
            steady = await self._start_steady(opening)
            await self._start_router(opening, steady)
            self.probe = Actor("probe", self._folder, "tests.soak.probe", self.router.url, steady)
            opening.push_async_callback(self.probe.close)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def _start_steady(self, opening: AsyncExitStack) -> str:
        steady = Actor("steady", self._folder, "scripts.bench.fake_worker", "--workers", "1")
        opening.push_async_callback(steady.close)
        await steady.start()
        url: str = json.loads(await steady.first_line())["workers"][0]
        return url

    async def _start_router(self, opening: AsyncExitStack, steady: str) -> None:
        flags = [*ROUTER, "--admin-listen", self._admin.removeprefix("http://"), "--worker", f"{steady},name=steady"]
        for engine in self.engines:
            flags += ["--worker", f"{engine.url},name={engine.name}"]
        self.router = RouterActor(self._folder, free_ports((0,)), flags)
        opening.push_async_callback(self.router.actor.close)
        await self.router.start()
        await self.router.serving(self.session)

    async def join(self, name: str) -> None:
        """The spare engine, under a name of its own."""
        added = {"url": self.spare.url, "name": name}
        async with self.session.post(f"{self._admin}/admin/workers", json=added) as answer:
            answer.raise_for_status()

    async def leave(self, name: str) -> None:
        """It is drained first."""
        async with self.session.delete(f"{self._admin}/admin/workers/{name}?timeout=5") as answer:
            answer.raise_for_status()

    async def is_here(self, name: str) -> bool:
        with contextlib.suppress(*GONE):
            async with self.session.get(f"{self._admin}/admin/workers/{name}") as answer:
                return answer.status == 200
        return True
