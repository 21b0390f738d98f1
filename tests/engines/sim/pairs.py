"""A simulated prefill worker and a decode worker, and both halves of a request as their connector wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from engines.sim.fleet import SimFleet
from tests.engines.sim.fleets import Client, Json, settings
from tests.fakes.waiting import until

TOKENS = list(range(100, 140))
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
IDLE = {"offered": 0, "loading": 0, "kept": 0}
PAIRS = ("nixl", "nixl-push", "mooncake", "sglang")
TOGETHER = ("nixl-push", "mooncake", "sglang")


class Pair:
    """`prefill` is worker 0, `decode` worker 1."""

    def __init__(self, session: aiohttp.ClientSession, fleet: SimFleet) -> None:
        self.connector = fleet.settings.connector
        self.fleet = fleet
        self.prefill = Client(session, fleet, 0)
        self.decode = Client(session, fleet, 1)
        self.place = self.prefill.worker.place
        self.request_id = "pair"

    async def state(self) -> Json:
        state: Json = await self.decode.get("/sim/transfers")
        return state

    async def violations(self) -> list[str]:
        return [str(each) for each in (await self.state())["violations"]]

    async def settled(self) -> None:
        """Nothing is held or waited for (any more)."""
        state = self.decode.worker.fleet.state
        await until(lambda: {name: state()[name] for name in IDLE} == IDLE)
        for client in (self.prefill, self.decode):
            await until(lambda client=client: not client.scheduler.busy)  # type: ignore[misc]
            assert client.scheduler.cache.usage == 0
            client.scheduler.cache.check_integrity()

    def prefill_body(self, body: Json) -> Json:
        one = {**body, "max_tokens": 1}
        params: Json = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.connector == "mooncake":
            return {**one, "ignore_eos": True, "kv_transfer_params": {**params, "transfer_id": "xfer-1"}}
        if self.connector == "sglang":
            return {**body, **self.bootstrap()}
        return one if self.connector == "store" else {**one, "kv_transfer_params": params}

    def decode_body(self, body: Json, answered: Json | None = None) -> Json:
        if self.connector == "sglang":
            return {**body, **self.bootstrap()}
        if self.connector == "store":
            return body
        return {**body, "kv_transfer_params": answered or self.decode_params()}

    def decode_params(self) -> Json:
        both: Json = {"do_remote_prefill": True, "do_remote_decode": False}
        if self.connector == "nixl-push":
            return {**both, **self.place.identity(0), "remote_request_id": "any"}
        url, engine_id = self.place.bootstrap_url, self.place.engine_ids[0]
        return {**both, "remote_bootstrap_addr": url, "remote_engine_id": engine_id, "transfer_id": "xfer-1"}

    def bootstrap(self) -> Json:
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.place.bootstrap_port, "bootstrap_room": 7}

    async def ask_prefill(self, body: Json, path: str = TEXT) -> tuple[int, Any]:
        return await self.prefill.post(path, body, X_Request_Id=self.request_id)

    async def ask_decode(self, body: Json, path: str = TEXT) -> tuple[int, Any]:
        return await self.decode.post(path, body, X_Request_Id=self.request_id)

    async def half(self, leg: str, body: Json) -> tuple[int, Any]:
        """`prefill` or `decode`, of connectors whose halves are sent at once."""
        if leg == "prefill":
            return await self.ask_prefill(self.prefill_body(body))
        return await self.ask_decode(self.decode_body(body))

    async def both(self, body: Json, path: str = TEXT) -> tuple[Any, Any]:
        """What the halves answer, both 200."""
        if self.connector in TOGETHER:
            halves = self.ask_prefill(self.prefill_body(body), path), self.ask_decode(self.decode_body(body), path)
            (first, p), (second, d) = await asyncio.gather(*halves)
        else:
            first, p = await self.ask_prefill({**self.prefill_body(body), "stream": False}, path)
            second, d = await self.ask_decode(self.decode_body(body, p.get("kv_transfer_params")), path)
        assert (first, second) == (200, 200), (p, d)
        return p, d


@asynccontextmanager
async def pair(connector: str, **changes: Any) -> AsyncIterator[Pair]:
    fields: Json = {
        "workers": 2,
        "roles": {0: "prefill", 1: "decode"},
        "connector": connector,
        "flavour": "sglang" if connector == "sglang" else "vllm",
        **changes,
    }
    async with SimFleet(settings(**fields)) as fleet, aiohttp.ClientSession() as session:
        yield Pair(session, fleet)
