"""The process with Mooncake's client: what it is told, and what becomes of it. In place of the library stands a module
of its name; the library itself is in tests/real/store/test_copies.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.store import mooncake_client
from router.store.mooncake_client import ClientFailed, MooncakeClient
from tests.fakes.mooncake_library import Place, place_in
from tests.fakes.waiting import until

RPC = "127.0.0.1:50051"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return place_in(tmp_path, monkeypatch)


@asynccontextmanager
async def client(rpc: str = RPC) -> AsyncIterator[MooncakeClient]:
    found = MooncakeClient(rpc)
    try:
        yield found
    finally:
        await found.close()


async def test_it_asks_the_master_for_each_copy(place: Place) -> None:
    place.write()
    async with client() as asked:
        await asked.copy("a@b", "10.0.0.1:7")
        await asked.copy("c", "10.0.0.2:8")
    assert place.calls == [
        ("setup", ["127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", RPC]),
        ("copy", ["a@b", ["10.0.0.1:7"]]),
        ("copy", ["c", ["10.0.0.2:8"]]),
    ]


async def test_a_copy_that_the_master_refuses_says_so_and_is_the_only_one(place: Place) -> None:
    place.write()
    async with client() as asked:
        with pytest.raises(ClientFailed, match="-704"):
            await asked.copy("gone", "s:1")
        await asked.copy("there", "s:1")
    assert [what for what, _ in place.calls] == ["setup", "copy", "copy"], "the same process"


async def test_a_master_that_is_not_reached(place: Place) -> None:
    place.write(setup=-900)
    async with client() as asked:
        for _ in range(2):
            with pytest.raises(ClientFailed, match=r"does not reach the master at 127\.0\.0\.1:50051.*-900"):
                await asked.copy("a", "s:1")


@pytest.mark.parametrize("rpc", ["[fe80::1%none]:50051", "mistyped..name:50051"])
async def test_a_master_whose_name_is_not_known(place: Place, rpc: str) -> None:
    place.write()
    async with client(rpc) as asked:
        with pytest.raises(ClientFailed, match=re.escape(f"no way to the master at {rpc}, the store's rpc: ")):
            await asked.copy("a", "s:1")
    assert not place.calls


async def test_a_library_that_cannot_be_loaded(place: Place) -> None:
    place.write(text="import surely_not_there")
    async with client() as asked:
        with pytest.raises(ClientFailed, match="surely_not_there"):
            await asked.copy("a", "s:1")


async def test_after_its_death_the_next_copy_starts_another(place: Place) -> None:
    place.write()
    async with client() as asked:
        with pytest.raises(ClientFailed, match="has ended"):
            await asked.copy("die", "s:1")
        await asked.copy("a", "s:1")
    assert [what for what, _ in place.calls] == ["setup", "copy", "setup", "copy"]


async def test_one_that_cannot_be_started() -> None:
    with pytest.raises(ClientFailed, match="cannot be started: No such file"):
        await MooncakeClient(RPC, python="/nowhere/python").copy("a", "s:1")


async def test_one_that_hangs_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write()
    async with client() as asked:
        await asked.copy("a", "s:1")
        process = asked._process
        monkeypatch.setattr(mooncake_client, "PATIENCE", 0.1)
        with pytest.raises(ClientFailed, match=r"within 0\.1 s"):
            await asked.copy("hang", "s:1")
        assert process
        assert process.returncode is not None
        monkeypatch.setattr(mooncake_client, "PATIENCE", 10.0)
        await asked.copy("b", "s:1")


async def test_it_ends_with_the_router(place: Place) -> None:
    """Whoever is gone cannot end it: the end of what it reads does."""
    place.write()
    async with client() as asked:
        await asked.copy("a", "s:1")
        process = asked._process
        assert process
        assert process.stdin
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 20.0)
        await until(lambda: place.calls[-1][0] == "close")
