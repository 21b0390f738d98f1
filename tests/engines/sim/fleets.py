"""A small simulated fleet that answers at once, and ways to talk to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from engines.sim.fleet import SimFleet
from engines.sim.settings import SimSettings
from engines.sim.timing import StepTiming

BLOCK = 16
INSTANT = StepTiming(
    base_s=1e-5, prefill_tokens_per_s=1e12, attention_s_per_pair=0, decode_s_per_sequence=0, kv_read_s_per_token=0
)
Json = dict[str, Any]


def settings(**changes: Any) -> SimSettings:
    """One worker with a cache of 200 blocks whose steps take no time worth speaking of."""
    fields: Json = {"workers": 1, "cache_tokens": 200 * BLOCK, "timing": INSTANT, **changes}
    return SimSettings(**fields)


class Client:
    """Talks to one worker."""

    def __init__(self, session: aiohttp.ClientSession, fleet: SimFleet, index: int = 0) -> None:
        self.session = session
        self.fleet = fleet
        self.worker = fleet.workers[index]
        self.scheduler = self.worker.ranks[0].scheduler
        self.url = fleet.urls[index]

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, path
            return await response.json() if response.content_type == "application/json" else await response.text()

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status, and JSON or text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=named) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def complete(self, prompt: Any, max_tokens: int = 4, **more: Any) -> Json:
        status, answer = await self.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
        assert status == 200, answer
        found: Json = answer
        return found

    async def stream(self, path: str, body: Json) -> list[Any]:
        """The data of each event; `[DONE]` stays text."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return events(await response.read())


def events(body: bytes) -> list[Any]:
    """What each server-sent event of a whole body says."""
    assert body.endswith(b"\n\n")
    lines = [event.removesuffix("\nevent: error") for event in body.decode().split("\n\n")[:-1]]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


@asynccontextmanager
async def client(**changes: Any) -> AsyncIterator[Client]:
    async with SimFleet(settings(**changes)) as fleet, aiohttp.ClientSession() as session:
        yield Client(session, fleet)


@asynccontextmanager
async def zmq_socket(kind: int, endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A connected socket; a SUB is subscribed to everything."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    try:
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(linger=0)
        context.term()
