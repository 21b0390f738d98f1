"""Two scripted workers, the event loops that the router runs on, and the log level as it was before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest

from publishers.event_loop import EventLoop
from tests.fakes.scripted_worker import ScriptedWorker


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop as in production; where transports matter most, asyncio's own too, which serves where there is none."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": EventLoop}
    if item.path.stem == "test_proxy_endings":
        factories["asyncio"] = asyncio.new_event_loop
    return factories


@pytest.fixture
async def a() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("a") as worker:
        yield worker


@pytest.fixture
async def b() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("b") as worker:
        yield worker


@pytest.fixture
def log_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
