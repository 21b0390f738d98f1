"""A Mooncake master as far as it is asked here: which objects are there, and how it says that it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from engines.store import Layout
from indexer.hashing import Tokens
from indexer.types import Namespace

PLAIN = Namespace()


class Master:
    """Has the objects in `there`, and answers as it is told to."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.url = ""
        self.there: set[str] = set()
        self.owners: dict[str, list[str]] = {}
        """Of an object, where it is not the usual one."""
        self.asked: list[list[str]] = []
        self.keys_shown: list[str] = []
        """API keys that came with questions, which it has no use for."""
        self.listed = 0
        """Times that all keys were asked for."""
        self.leased: list[str] = []
        self.answer: Callable[[], web.Response] | None = None
        self.keys_answer: Callable[[], web.Response] | None = None
        """In place of the list of all keys."""
        self.counts = {"master_total_capacity_bytes": 1 << 20, "master_active_clients": 1}
        self.segments_text: str | None = None
        """In place of what would be answered on /get_segments_detail."""
        self.go_on = asyncio.Event()
        self.go_on.set()

    def put(self, tokens: Tokens, blocks: int, namespace: Namespace = PLAIN) -> None:
        digests = self.layout.hashes(tokens, namespace) or []
        self.there.update(key for digest in digests[:blocks] for key in self.layout.keys(digest))

    async def query(self, request: web.Request) -> web.Response:
        keys = request.query["keys"].split(",")
        self.asked.append(keys)
        self.keys_shown += request.headers.getall("authorization", [])
        await self.go_on.wait()
        if self.answer:
            return self.answer()
        return web.json_response({"success": True, "data": {key: self._object(key) for key in keys}})

    def _object(self, key: str) -> dict[str, object]:
        owners = self.owners.get(key, ["h:1"])
        return {
            "ok": key in self.there,
            "values": [{"size_": 1, "transport_endpoint_": owner} for owner in owners],
        }

    async def lease(self, request: web.Request) -> web.Response:
        key = request.query["key"]
        self.leased.append(key)
        return web.Response(status=200 if key in self.there else 404)

    async def keys(self, _: web.Request) -> web.Response:
        self.listed += 1
        if self.keys_answer:
            return self.keys_answer()
        return web.Response(text="".join(f"{key}\n" for key in sorted(self.there)))

    async def health(self, _: web.Request) -> web.Response:
        state = {"role": "leader", "ha_state": "serving", "service_ready": True, "leader_address": None}
        return web.json_response({"status": "ok", **state})

    async def segments(self, _: web.Request) -> web.Response:
        used = {"size_bytes": 1 << 20, "allocator_used_bytes": len(self.there)}
        told = {"segments": [{"segment_name": "10.0.0.7:7", "te_endpoint": "h:1", **used}]}
        return web.json_response(text=self.segments_text or json.dumps(told))

    async def metrics(self, _: web.Request) -> web.Response:
        there = {"master_key_count": len(self.there), "master_allocated_bytes": len(self.there)}
        return web.Response(text="".join(f"{name} {value}\n" for name, value in (there | self.counts).items()))


@asynccontextmanager
async def serving(layout: Layout) -> AsyncIterator[Master]:
    master, app = Master(layout), web.Application()
    app.router.add_get("/batch_query_keys", master.query)
    app.router.add_get("/query_key", master.lease)
    app.router.add_get("/get_all_keys", master.keys)
    app.router.add_get("/health", master.health)
    app.router.add_get("/get_segments_detail", master.segments)
    app.router.add_get("/metrics", master.metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, max_line_size=2**20)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    master.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield master
    finally:
        master.go_on.set()
        await runner.cleanup()
