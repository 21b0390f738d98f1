"""An engine reduced to the answers that a test gives it, on a free port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = tuple[int, bytes]
Answering = Answer | Callable[[bytes], Answer | Awaitable[Answer]]
"""A fixed answer, or one made of the request's body."""


def models(*names: str, **fields: object) -> Answer:
    """What vLLM answers on /v1/models."""
    data = [{"id": name, "object": "model", "owned_by": "vllm", **fields} for name in names]
    return 200, msgspec.json.encode({"object": "list", "data": data})


class HttpEngine:
    """`answers` by path, to be changed at will; /health is well and the rest is 404 unless they say otherwise. The
    content of a redirect is where it leads."""

    def __init__(self, answers: Mapping[str, Answering] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answering] = {"/health": (200, b""), **(answers or {})}
        self.asked: list[tuple[str, bytes]] = []
        """Path and body of every request."""
        self.authorizations: list[str | None] = []
        """The header of every request."""
        self._tls = tls
        self._server: TestServer | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app)
        await self._server.start_server(access_log=None, ssl=self._tls)

    async def stop(self) -> None:
        """Again: nothing."""
        if self._server:
            await self._server.close()

    @property
    def url(self) -> str:
        """While it runs."""
        assert self._server
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.port}"

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.path, body))
        self.authorizations.append(request.headers.get("Authorization"))
        answering = self.answers.get(request.path, (404, b""))
        answer = answering(body) if callable(answering) else answering
        status, content = answer if isinstance(answer, tuple) else await answer
        headers = {"Location": content.decode()} if 300 <= status < 400 else None
        return web.Response(status=status, body=content, headers=headers)


@asynccontextmanager
async def running(engine: HttpEngine) -> AsyncIterator[HttpEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
