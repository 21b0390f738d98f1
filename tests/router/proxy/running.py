"""A whole router in this process, in front of scripted workers; every test that uses it also proves that nothing is
left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client import generate_latest

from router.app import App
from router.cli import Source
from router.settings import Settings
from router.workers.spec import parse_worker
from tests.fakes.raw_client import RawClient
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until


class RunningRouter:
    def __init__(self, app: App) -> None:
        self.app = app

    @property
    def port(self) -> int:
        return self.app.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def hang_up(self) -> None:
        """SIGHUP, and returns when the settings have been read again."""
        self.app.on_hangup()
        await asyncio.gather(*self.app._reloads)

    def client(self, receive_buffer: int | None = None, limit: int = 2**16) -> RawClient:
        return RawClient(self.port, receive_buffer, limit)

    def samples(self, name: str) -> dict[str, float]:
        """The metric `name` by worker, where it is not 0."""
        return {labels.get("worker", ""): value for labels, value in self._samples(name) if value}

    def total(self, name: str, **wanted: str) -> float:
        return sum(value for labels, value in self._samples(name) if wanted.items() <= labels.items())

    def _samples(self, *names: str) -> Iterator[tuple[dict[str, str], float]]:
        """Without a page, whose text took most of all tests' time, and of those alone that tell of these `names`."""
        tellers = self.app._metrics.registry._names_to_collectors
        for teller in {tellers[name] for name in names}:
            for family in teller.collect():
                yield from ((sample.labels, sample.value) for sample in family.samples if sample.name in names)

    @property
    def loads(self) -> float:
        """Requests and tokens booked anywhere, and requests being served."""
        names = ("router_load_requests", "router_load_prefill_tokens", "router_load_active_tokens")
        return sum(value for _, value in self._samples(*names, "router_requests_in_flight"))

    async def at_rest(self) -> None:
        await until(lambda: not self.loads)

    def breaker(self, worker: ScriptedWorker) -> str:
        """Its state."""
        samples = self._samples("router_worker_breaker")
        (state,) = (labels["state"] for labels, value in samples if value and labels["worker"] == worker.name)
        return state

    def is_up(self, worker: ScriptedWorker) -> bool:
        return self.samples("router_worker_up").get(worker.name) == 1


@asynccontextmanager
async def running(
    *workers: ScriptedWorker, options: str = "", source: Source | None = None, **settings: Any
) -> AsyncIterator[RunningRouter]:
    """`options`: appended to each `--worker`. Health checks and the limit on connecting are out of the way unless
    given."""
    others = asyncio.all_tasks()
    specs = tuple(parse_worker(f"{worker.url},name={worker.name}{options}") for worker in workers)
    defaults: dict[str, Any] = {
        "router_mode": "round-robin",
        "health_interval": 60.0,
        "connect_timeout": 60.0,
        "tokenizer": "engine",
        "seed": 1,
        "port": 0,
    }
    app = App(Settings(workers=specs, **{**defaults, **settings}), source=source)
    try:
        await app.start()
        router = RunningRouter(app)
        yield router
        await router.at_rest()
        generate_latest(app._metrics.registry)  # a page can be made of all that is shown
    finally:
        await app.drain(0)
        await app.close()
    await until(lambda: not {task for task in asyncio.all_tasks() - others if not _is_fake(task)})


def source_of(*workers: ScriptedWorker) -> Source:
    """Settings that name these workers, to be read again."""
    return Source([part for worker in workers for part in ("--worker", f"{worker.url},name={worker.name}")], {})


def _is_fake(task: asyncio.Task[Any]) -> bool:
    """Scripts may outlive the router: the fake's own affair."""
    return getattr(task.get_coro(), "__qualname__", "") == "_play"


@asynccontextmanager
async def session(router: RunningRouter) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(20)) as client:
        yield client
