"""Lookups of names: one that hangs keeps nobody else waiting, nor the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from publishers.event_loop import EventLoop
from tests.fakes.waiting import until


class Names:
    """Stands for the system's lookups."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[str] = []
        self.known: dict[str, list[str]] = {}

    def look_up(self, host: str, port: int, *_: Any) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host.endswith(".hangs"):
            self.go_on.wait()
        if host not in self.known and not host[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.known.get(host, [host])
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found.look_up)
    yield found
    found.go_on.set()


def on_the_loop(test: Callable[[Names], Coroutine[None, None, None]]) -> Callable[[Names], None]:
    @functools.wraps(test)
    def run(names: Names) -> None:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(test(names))

    return run


async def served() -> tuple[asyncio.Server, int]:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@on_the_loop
async def test_all_else_goes_on_while_names_hang(names: Names) -> None:
    loop = asyncio.get_running_loop()
    hanging = [loop.create_task(loop.create_connection(asyncio.Protocol, f"{n}.hangs", 1)) for n in range(9)]
    await until(lambda: len(names.asked) == len(hanging))
    names.known["engine"] = ["127.0.0.1"]
    server, port = await served()
    for host in ("engine", "127.0.0.1"):
        transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
        transport.abort()
    server.close()
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_takes_no_thread(monkeypatch: pytest.MonkeyPatch, host: str, family: int) -> None:
    """Where a thousand engines were gone, threads for their addresses took a third of the time."""
    monkeypatch.setattr(threading, "Thread", None)
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        ((found, *_, address),) = runner.run(runner.get_loop().getaddrinfo(host, 80, type=socket.SOCK_STREAM))
    assert (found, *address[:2]) == (family, host, 80)


@on_the_loop
async def test_a_name_is_looked_up_once_for_all_who_ask_meanwhile(names: Names) -> None:
    loop = asyncio.get_running_loop()
    names.known["a.hangs"] = ["127.0.0.1"]
    first, *others = (loop.create_task(loop.getaddrinfo("a.hangs", 1)) for _ in range(3))
    await until(lambda: names.asked)
    first.cancel()
    names.go_on.set()
    assert await asyncio.gather(*others) == [await loop.getaddrinfo("a.hangs", 1)] * 2
    assert names.asked == ["a.hangs", "a.hangs"], "what is found is not kept"


@on_the_loop
async def test_where_there_may_be_no_more_threads_a_lookup_fails_and_the_next_is_made(names: Names) -> None:
    loop, engine = asyncio.get_running_loop(), "engine"
    names.known[engine] = ["127.0.0.1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="no thread") as refused:
            await loop.create_connection(asyncio.Protocol, engine, 1)
    assert refused.value.errno == errno.ENOMEM, "no fault of the engine's"
    async with asyncio.timeout(30):
        assert await loop.getaddrinfo(engine, 1)


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@on_the_loop
async def test_addresses_are_tried_in_their_order(names: Names) -> None:
    server, port = await served()
    names.known["engine"] = ["127.0.0.2", "127.0.0.1"]
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "engine", port)
    assert transport.get_extra_info("peername") == ("127.0.0.1", port)
    transport.abort()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "engine", port)


@on_the_loop
async def test_an_address_that_swallows_packets_does_not_keep_back_the_next(names: Names) -> None:
    server, port = await served()
    with socket.socket() as full, contextlib.ExitStack() as callers:
        callers.callback(server.close)
        full.bind(("127.0.0.2", port))
        full.listen(0)
        for _ in range(3):  # beyond its backlog the system answers nobody
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.2", port))
        names.known["engine"] = ["127.0.0.2", "127.0.0.1"]
        async with asyncio.timeout(30):
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "engine", port)
        assert transport.get_extra_info("peername") == ("127.0.0.1", port)
        transport.abort()


@on_the_loop
async def test_a_name_that_there_is_not(names: Names) -> None:
    with pytest.raises(socket.gaierror, match="not known"):
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "nobody", 1)
    assert names.asked == ["nobody"]
