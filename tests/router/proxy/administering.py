"""Asks the admin surface of a router that runs here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from router.settings.administration import Address
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

HERE = Address("127.0.0.1", 0)


class Admin:
    """Each method answers (status, body)."""

    def __init__(self, router: RunningRouter, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client

    async def ask(self, method: str, path: str, **how: Any) -> tuple[int, Any]:
        async with self.client.request(method, f"/admin/{path}", **how) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.json()

    async def add(self, worker: ScriptedWorker, **keys: Any) -> tuple[int, Any]:
        return await self.ask("POST", "workers", json={"url": worker.url, "name": worker.name, **keys})

    async def remove(self, name: str, **query: str | list[str]) -> tuple[int, Any]:
        return await self.ask("DELETE", f"workers/{name}", params=query)

    async def change(self, worker: str, **what: Any) -> tuple[int, Any]:
        return await self.ask("PATCH", f"workers/{worker}", json=what)

    async def show(self, name: str) -> tuple[int, Any]:
        return await self.ask("GET", f"workers/{name}")

    async def until_up(self, worker: ScriptedWorker) -> None:
        await until(lambda: self.router.is_up(worker))

    async def until_gone(self, name: str) -> None:
        await until(lambda: name not in self.router.app._fleet.workers)


@asynccontextmanager
async def admin_of(router: RunningRouter) -> AsyncIterator[Admin]:
    surface = router.app._admin
    assert surface
    async with aiohttp.ClientSession(f"http://127.0.0.1:{surface.port}", timeout=aiohttp.ClientTimeout(20)) as client:
        yield Admin(router, client)


@asynccontextmanager
async def administering(*workers: ScriptedWorker, **how: Any) -> AsyncIterator[Admin]:
    async with running(*workers, admin_listen=HERE, **how) as router, admin_of(router) as admin:
        yield admin
