"""A Mooncake master as far as routing asks it: which objects are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from engines.store import StoreKeys
from indexer.hashing import Tokens
from indexer.types import Namespace

PLAIN = Namespace()


class Master:
    """Has the objects in `there`, and answers as it is told to."""

    def __init__(self, layout: StoreKeys) -> None:
        self.layout = layout
        self.url = ""
        self.there: set[str] = set()
        self.asked: list[list[str]] = []
        self.answer: Callable[[], web.Response] | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    def put(self, tokens: Tokens, blocks: int, namespace: Namespace = PLAIN) -> None:
        digests = self.layout.hashes(tokens, namespace) or []
        self.there.update(key for digest in digests[:blocks] for key in self.layout.keys(digest))

    async def query(self, request: web.Request) -> web.Response:
        keys = request.query["keys"].split(",")
        self.asked.append(keys)
        await self.go_on.wait()
        if self.answer:
            return self.answer()
        replica = {"size_": 1, "transport_endpoint_": "h:1"}
        return web.json_response(
            {"success": True, "data": {k: {"ok": k in self.there, "values": [replica]} for k in keys}}
        )

    async def keys(self, _: web.Request) -> web.Response:
        return web.Response(text="".join(f"{key}\n" for key in sorted(self.there)))


@asynccontextmanager
async def serving(layout: StoreKeys) -> AsyncIterator[Master]:
    master, app = Master(layout), web.Application()
    app.router.add_get("/batch_query_keys", master.query)
    app.router.add_get("/get_all_keys", master.keys)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, max_line_size=2**20)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    master.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield master
    finally:
        master.go_on.set()
        await runner.cleanup()
