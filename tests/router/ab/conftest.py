"""A scripted worker: answers what the test tells it to, over a real socket on a free port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest

from router.ab.client import Address

Answer = Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]
"""Gets the head and the body of a request, writes the answer; the connection is closed after it."""
Serve = Callable[[Answer], Awaitable[Address]]


@asynccontextmanager
async def scripted(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Address]:
    under_way = set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            await answer(head, await reader.readexactly(int(length or 0)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client gave up, which is its right
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    async with server:  # which waits for those under way, from Python 3.12 on
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1], tls=tls)
        for task in under_way:
            task.cancel()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(answer: Answer) -> Address:
            return await stack.enter_async_context(scripted(answer))

        yield start
