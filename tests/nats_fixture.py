"""A real nats-server for tests. Import the fixture `nats_server` where it is wanted, or use `running_nats_server`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest_asyncio

from publishers.embedded_nats import NatsServer


@asynccontextmanager
async def running_nats_server() -> AsyncIterator[NatsServer]:
    """A server on a free port of 127.0.0.1 (`.url`). `stop()` and `start()` end it and bring it back on that port."""
    server = NatsServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest_asyncio.fixture
async def nats_server() -> AsyncIterator[NatsServer]:
    async with running_nats_server() as server:
        yield server
