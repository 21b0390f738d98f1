"""One store, two vLLMs that share it and a router in front of them, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.conftest import running, serving
from tests.real.fleet import Router

from .members import Master, Member

TOKENS_DECIDE = ("--kv-policy", "overlap")
"""For a router of which a test says where a request goes: 5,000 active tokens on the holder outweigh a load of 1,984.
`auto` may rightly have it wait the 15 ms that the busy holder takes, instead of loading for 40."""


@pytest.fixture(scope="session")
def master(logs: Path) -> Iterator[Master]:
    found = Master(logs)
    try:
        found.start()
        yield found
    finally:
        found.process.kill()


@pytest.fixture(scope="session")
def members(master: Master, logs: Path) -> Iterator[list[Member]]:
    yield from serving([Member(name, master, logs) for name in ("store-a", "store-b")])


@pytest.fixture
def a(members: list[Member]) -> Member:
    return members[0]


@pytest.fixture
def b(members: list[Member]) -> Member:
    return members[1]


@pytest.fixture(scope="session")
def store_router(master: Master, members: list[Member], logs: Path) -> Iterator[Router]:
    store = f"{master.url},budget_ms=500"
    yield from running(Router("router-store", members, logs, *TOKENS_DECIDE, "--store", store))


@pytest.fixture
def router(store_router: Router) -> Router:
    store_router.until_all_are_up()
    return store_router
