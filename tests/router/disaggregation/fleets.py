"""A whole router in front of a strict simulated fleet of prefill and decode workers; whoever uses it also proves that
nothing is left behind: no booking, no task, no KV, and no violation of what the connector wants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from engines.description import Role
from engines.sim.connectors.base import Fleet as SimPairs
from engines.sim.faults import Fault
from engines.sim.fleet import SimFleet
from engines.sim.settings import SimSettings
from engines.sim.worker import Worker as SimWorker
from router.app import App
from router.proxy.exchange import Exchange
from router.scheduling.load import Load
from router.settings import Settings
from router.workers.spec import WorkerSpec, parse_worker
from tests.engines.sim.fleets import client, settings
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter

CONNECTORS = ("nixl", "nixl-push", "mooncake", "store", "sglang")
TOGETHER = ("nixl-push", "mooncake", "sglang")
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = list(range(100, 140))
IDLE = {"offered": 0, "loading": 0, "kept": 0}
Json = dict[str, Any]


class MortalFleet(SimFleet):
    """Its workers can be killed one by one."""

    def __init__(self, of: SimSettings) -> None:
        super().__init__(of)
        self._runners: dict[int, web.AppRunner] = {}

    async def _serve(self, app: web.Application, opening: AsyncExitStack, offset: int) -> int:
        runner = self._runners[offset] = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        opening.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, self.settings.host, 0).start()
        return int(runner.addresses[0][1])

    async def kill(self, index: int) -> None:
        """Its connections break, its port refuses, and what it held for others is gone: who waits for that is told."""
        await self._runners[index].cleanup()
        worker, transfers = self.workers[index], self.workers[index].fleet.transfers
        for offer in [each for each in transfers.offers.values() if each.rank in worker.ranks]:
            want = transfers.wants.get(offer.key)
            transfers.withdraw(offer, "was on a worker that died")
            if want:
                transfers._lose(want)


class Fleet:
    """Workers p0, p1, …; d0, …; b0, … in that order, and the router before them."""

    def __init__(
        self, router: RunningRouter, sim: MortalFleet, names: list[str], session: aiohttp.ClientSession
    ) -> None:
        self.router = router
        self.sim = sim
        self.session = session
        self._index = {name: index for index, name in enumerate(names)}

    @property
    def pairs(self) -> SimPairs:
        return self.sim.workers[0].fleet

    def worker(self, name: str) -> SimWorker:
        return self.sim.workers[self._index[name]]

    def breaker(self, name: str) -> str:
        """Its state at the router."""
        return list(self.router.app._fleet.workers.values())[self._index[name]].breaker.state

    def strike(self, names: str, kind: Any, **fields: Any) -> None:
        """The fault is for whoever of those whose names begin so gets the next request."""
        for armed in ("_armed", "_transfers"):
            shared: deque[Any] = deque()
            for faults in (self.worker(name).faults for name in self._index if name.startswith(names)):
                setattr(faults, armed, shared)
        next(self.worker(name) for name in self._index if name.startswith(names)).faults.arm(Fault(kind, **fields))

    async def post(self, body: Json, path: str = TEXT, **headers: str) -> tuple[int, Any]:
        """Status, and JSON or text."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.router.url + path, json=body, headers=named) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.router.url + path) as response:
            return response.status, await response.json()

    def busy(self, kind: str) -> list[str]:
        """The workers of a kind that have a request."""
        return [name for name in self._index if name.startswith(kind) and self.worker(name).in_flight]

    async def kill(self, name: str) -> None:
        await self.sim.kill(self._index[name])

    async def run_out_of_time(self, leg: str) -> None:
        """The time of a part of the one request under way is over, once it runs."""
        exchange = await self._exchange()
        if leg == "prefill":
            assert exchange.split
            assert exchange.split._prefill
            exchange.split._prefill._time_out(0.0)
        else:
            await until(lambda: exchange.split and exchange.split._timer)
            assert exchange.split
            timer = exchange.split._timer
            assert timer
            assert not timer.cancelled()
            timer.cancel()
            exchange._on_late(0.0)

    async def _exchange(self) -> Exchange:
        connections = self.router.app._clients.open
        await until(lambda: any(connection._exchange for connection in connections))
        (exchange,) = (connection._exchange for connection in connections if connection._exchange)
        assert isinstance(exchange, Exchange)
        return exchange

    def failures(self) -> dict[str, int]:
        """By leg."""
        return dict(self.router.app._metrics.tallies.parted.failures)

    async def settled(self) -> None:
        """The router has nothing under way, and no worker holds anything for anybody. Leases end at once."""
        await at_rest(self.router.app)
        await until(lambda: not any(worker.in_flight for worker in self.sim.workers))
        transfers = self.pairs.transfers
        for offer in list(transfers.offers.values()):
            assert offer.lease is not None
            transfers.withdraw(offer, "was offered until its lease was over")
        await until(lambda: {name: self.pairs.state()[name] for name in IDLE} == IDLE)
        assert all(scheduler.cache.usage == 0 for scheduler in self.pairs.schedulers)


@asynccontextmanager
async def fleet(
    connector: str,
    prefills: int = 1,
    decodes: int = 1,
    boths: int = 0,
    sim: Mapping[str, Any] | None = None,
    violations: int = 0,
    **router_settings: Any,
) -> AsyncIterator[Fleet]:
    """`sim`: changes of the simulated workers' settings. `violations`: how many are meant to come about."""
    names = [
        f"{kind}{index}" for kind, count in (("p", prefills), ("d", decodes), ("b", boths)) for index in range(count)
    ]
    roles: dict[int, Role] = {index: ROLES[name[0]] for index, name in enumerate(names)}
    fields: Json = {
        "workers": len(names),
        "roles": roles,
        "connector": connector,
        "flavour": "sglang" if connector == "sglang" else "vllm",
        "kv_events": False,
        **(sim or {}),
    }
    async with MortalFleet(settings(**fields)) as simulated, aiohttp.ClientSession() as session:
        specs = tuple(spec_of(simulated, index, name) for index, name in enumerate(names))
        async with running(specs, **router_settings) as router:
            fleet = Fleet(router, simulated, names, session)
            yield fleet
            await fleet.settled()
            found = fleet.pairs.transfers.violations
            assert len(found) == violations, found


ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "b": "both"}


def spec_of(simulated: MortalFleet, index: int, name: str) -> WorkerSpec:
    """All is stated of a worker of vLLM, which tells nothing; SGLang is to be asked."""
    url = simulated.urls[index]
    if simulated.settings.flavour == "sglang":
        return parse_worker(f"{url},name={name}")
    bootstrap = simulated.bootstraps.get(url, "").rpartition(":")[2]
    port = f",bootstrap_port={bootstrap}" if bootstrap else ""
    return parse_worker(f"{url},name={name},role={ROLES[name[0]]},connector={simulated.settings.connector}{port}")


@asynccontextmanager
async def running(specs: tuple[WorkerSpec, ...], **changes: Any) -> AsyncIterator[RunningRouter]:
    others = asyncio.all_tasks()
    defaults: dict[str, Any] = {
        "router_mode": "round-robin",
        "health_interval": 60.0,
        "connect_timeout": 60.0,
        "tokenizer": "engine",
        "kv_events": False,
        "load_interval": 3600.0,  # what an engine tells in the middle of a request may be more than is booked
        "pd_timeout": 30.0,
        "seed": 1,
        "port": 0,
    }
    app = App(Settings(workers=specs, **{**defaults, **changes}))
    try:
        await app.start()
        router = RunningRouter(app)
        yield router
        await at_rest(app)
    finally:
        await app.drain(0)
        await app.close()
    await until(lambda: not {task for task in asyncio.all_tasks() - others if _is_routers(task)})


async def at_rest(app: App) -> None:
    """What `RunningRouter.at_rest` finds in the metrics, of which there are too many here to be rendered often."""
    await until(lambda: not app._metrics.tallies.in_flight)
    ranks = [rank for worker in app._fleet.workers.values() for rank in worker.ranks]
    assert {app._book.load(rank, 0.0) for rank in ranks} == {Load()}


def _is_routers(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "/tests/" not in code.co_filename and "/router/" in code.co_filename


async def alone(connector: str, body: Json, path: str = TEXT) -> str:
    """What one worker that does it all says."""
    async with client(flavour="sglang" if connector == "sglang" else "vllm") as worker:
        status, answer = await worker.post(path, {**body, "stream": False, "stream_options": None})
        assert status == 200, answer
        return text_of(answer)


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed_text(events: list[Any]) -> str:
    found = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
            found += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
    return found
