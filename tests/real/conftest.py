"""Engines, nats-server, publishers and two routers, started once: one router reads the engines itself, the other
learns all from publishers through NATS."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from .fleet import Engine, Nats, Publisher, Router

AnEngine = TypeVar("AnEngine", bound=Engine)

PREFIX_DECIDES = ("--kv-policy", "lmetric")
"""For routers of which a test says where a request goes. `auto` predicts, and rightly so: one of these engines may take
longer for 12 tokens than another for 428."""


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def engines(logs: Path) -> Iterator[list[Engine]]:
    """Two vLLM workers, then one of SGLang."""
    yield from serving(
        [Engine("vllm", "vllm-a", logs), Engine("vllm", "vllm-b", logs), Engine("sglang", "sglang", logs)]
    )


@pytest.fixture(scope="session")
def nats(logs: Path) -> Iterator[Nats]:
    server = Nats(logs)
    server.start()
    yield server
    server.process.stop()


@pytest.fixture(scope="session")
def local_router(engines: list[Engine], logs: Path) -> Iterator[Router]:
    yield from running(Router("router-local", engines, logs, *PREFIX_DECIDES))


@pytest.fixture(scope="session")
def publishers(engines: list[Engine], nats: Nats, logs: Path) -> Iterator[list[Publisher]]:
    started = [Publisher(engine, nats.url, logs) for engine in engines]
    for publisher in started:
        publisher.process.start()
    yield started
    for publisher in started:
        publisher.process.stop()


@pytest.fixture(scope="session")
def nats_router(engines: list[Engine], publishers: list[Publisher], nats: Nats, logs: Path) -> Iterator[Router]:
    yield from running(Router("router-nats", engines, logs, *PREFIX_DECIDES, "--event-plane", nats.url))


@pytest.fixture(params=["local", "nats"])
def router(request: pytest.FixtureRequest) -> Router:
    """Each test that takes it runs once for each way by which events arrive."""
    found = request.getfixturevalue(f"{request.param}_router")
    assert isinstance(found, Router)
    found.until_all_are_up()
    return found


@pytest.fixture
def vllm(engines: list[Engine]) -> Engine:
    return engines[0]


@pytest.fixture
def sglang(engines: list[Engine]) -> Engine:
    return engines[2]


def serving(fleet: list[AnEngine]) -> Iterator[list[AnEngine]]:
    """All of them at once."""
    with ExitStack() as stack:
        for engine in fleet:
            stack.callback(engine.process.kill)
            engine.process.start()
        for engine in fleet:
            engine.wait_until_up()
        yield fleet
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.process.stop(), fleet))


def running(router: Router) -> Iterator[Router]:
    try:
        router.start()
        yield router
    finally:
        router.process.stop()
