"""A store whose blocks are in two parts, a worker that shares it, and the command line that asks both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest

from engines.store import VllmLayout
from router.__main__ import main
from tests.fakes.scripted_worker import BLOCK_SIZE, ScriptedWorker
from tests.fakes.store_master import Master, serving

LAYOUT = VllmLayout(model="tiny", block_size=BLOCK_SIZE, tp=2)


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    async with serving(LAYOUT) as found:
        yield found


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("a") as found:
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`python -m router store` with these arguments."""

    async def run(*arguments: str) -> Ended:
        capsys.readouterr()  # what a router said meanwhile
        status = await asyncio.to_thread(main, ["store", *arguments])
        return Ended(status, *capsys.readouterr())

    return run
