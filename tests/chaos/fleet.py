"""The fleet of a scenario: workers behind proxies that go wrong, publishers and a nats-server if wanted, the router."""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from publishers.embedded_nats import NatsServer
from tests.chaos.actors import Actor, free_ports
from tests.chaos.ledger import Ledger
from tests.chaos.router_actor import RouterActor
from tests.chaos.scenarios import Scenario
from tests.fakes.faulty_proxy import FaultyProxy
from tests.nats_fixture import running_nats_server

PORTS = (0, 1000, 1001)
"""A simulated worker's HTTP, its events and its replays (`engines.sim.settings`), as seen from the first."""
CACHE_TOKENS = 16_384
SIM = ("--workers", "1", "--cache-tokens", str(CACHE_TOKENS), "--max-model-len", "8192", "--base-s", "0.004")
FIRST_ANSWER = aiohttp.ClientTimeout(60)
GONE = (aiohttp.ClientError, TimeoutError, OSError)


class WorkerActor:
    """One simulated engine."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"w{number}"
        self.number = number
        self.port = free_ports(PORTS)
        self.actor = Actor(self.name, folder, "engines.sim", "--port", str(self.port), *SIM)
        self.proxy = FaultyProxy("127.0.0.1", self.port, seed=number)
        self._struck: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Returns when it has answered once, for which it compiles."""
        self._struck.clear()
        await self.actor.start()
        await self.actor.first_line()
        first = {"prompt": "x" * 64, "max_tokens": 1}
        async with session.post(f"{self.url}/v1/completions", json=first, timeout=FIRST_ANSWER) as answer:
            assert answer.status == 200

    async def get(self, session: aiohttp.ClientSession, path: str) -> Any:
        async with session.get(self.url + path) as answer:
            return await answer.json() if answer.content_type == "application/json" else await answer.text()

    async def arm(self, session: aiohttp.ClientSession, **fault: Any) -> None:
        async with session.post(f"{self.url}/sim/fault", json=fault):
            pass

    async def disarm(self, session: aiohttp.ClientSession) -> None:
        with contextlib.suppress(*GONE):
            async with session.post(f"{self.url}/sim/faults/clear"):
                pass

    async def collect(self, session: aiohttp.ClientSession, ledger: Ledger) -> int:
        """Count what has struck since the last time; how much still waits for its request."""
        told = await self.get(session, "/sim/faults")
        struck = Counter(told["struck"])
        for kind, count in (struck - self._struck).items():
            ledger.fault(kind, self.name, count)
        self._struck = struck
        return int(told["armed"])


class Fleet:
    """`async with Fleet(…) as fleet`: all run."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.workers = [WorkerActor(number, folder) for number in range(scenario.workers)]
        self.publishers: list[Actor] = []
        self.nats: NatsServer | None = None
        self.router: RouterActor
        self.session: aiohttp.ClientSession
        self._scenario = scenario
        self._folder = folder
        self._settings = folder / "router.yaml"
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            self.session = await opening.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)))
            for worker in self.workers:
                opening.push_async_callback(worker.actor.close)
                await worker.proxy.start()
                opening.push_async_callback(worker.proxy.close)
                await worker.start(self.session)
            if self._scenario.nats:
                self.nats = await opening.enter_async_context(running_nats_server())
                await self._start_publishers(self.nats, opening)
            await self._start_router(opening)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def _start_publishers(self, nats: NatsServer, opening: AsyncExitStack) -> None:
        for worker in self.workers:
            flags = ("--engine", worker.url, "--nats", nats.url, "--worker-id", worker.name)
            publisher = Actor(f"publisher-{worker.name}", self._folder, "publishers", *flags)
            opening.push_async_callback(publisher.close)
            await publisher.start()
            self.publishers.append(publisher)

    def state_workers(self, without: WorkerActor | None = None) -> None:
        """In the router's settings."""
        stated = [
            f"  - http://127.0.0.1:{each.proxy.port},name={each.name}" for each in self.workers if each != without
        ]
        new = self._settings.with_suffix(".new")
        new.write_text("\n".join(["worker:", *stated, ""]))
        new.replace(self._settings)

    async def _start_router(self, opening: AsyncExitStack) -> None:
        self.state_workers()
        plane = self.nats.url if self.nats else "local"
        flags = ["--config", str(self._settings), "--health-interval", "1", "--event-plane", plane]
        flags += self._scenario.flags
        port = free_ports((0,))
        self.router = RouterActor(self._folder, port, flags, self._scenario.processes)
        opening.push_async_callback(self.router.actor.close)
        await self.router.start()

    @property
    def actors(self) -> list[Actor]:
        return [self.router.actor, *self.publishers, *(worker.actor for worker in self.workers)]
