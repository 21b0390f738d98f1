"""The proxy that others' fault tests stand on does what it says, and nothing when it is told nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.waiting import until


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._pending: asyncio.Task[bytes] | None = None

    async def echo(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readexactly(len(data))

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.wait([asyncio.ensure_future(self.writer.wait_closed())])


@asynccontextmanager
async def proxied(seed: int = 0) -> AsyncIterator[FaultyProxy]:
    """A proxy before a server that answers with what it was sent."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1")
    try:
        async with FaultyProxy("127.0.0.1", server.sockets[0].getsockname()[1], seed=seed) as proxy:
            yield proxy
    finally:
        server.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@asynccontextmanager
async def connected(proxy: FaultyProxy) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", proxy.port))
    try:
        yield client
    finally:
        await client.close()


async def arrives(client: Client, seconds: float) -> bool:
    """Whether anything comes back within `seconds`; it may still come later."""
    waiting = asyncio.ensure_future(client.reader.readexactly(1))
    done, _ = await asyncio.wait([waiting], timeout=seconds)
    if not done:
        waiting.cancel()
        await asyncio.wait([waiting])
    return bool(done)


async def test_bytes_pass_both_ways_and_so_does_the_end() -> None:
    async with proxied() as proxy, connected(proxy) as client:
        data = bytes(range(256)) * 4000
        client.writer.write(data)
        client.writer.write_eof()
        assert await client.reader.read(-1) == data
        await until(lambda: not proxy.connections)
        assert proxy.accepted == 1


async def test_a_cut_resets_what_is_open_and_nothing_that_comes() -> None:
    async with proxied() as proxy, connected(proxy) as first:
        assert await first.echo(b"x") == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await first.reader.readexactly(1)
        async with connected(proxy) as second:
            assert await second.echo(b"y") == b"y"


async def test_refused_connections_are_refused_and_those_there_are_go_on() -> None:
    async with proxied() as proxy, connected(proxy) as client:
        assert await client.echo(b"x") == b"x"
        for _ in range(2):
            proxy.refuse(True)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await client.echo(b"y") == b"y"
        proxy.refuse(False)
        async with connected(proxy) as other:
            assert await other.echo(b"z") == b"z"


@pytest.mark.parametrize("direction", ["up", "down", "both"])
async def test_what_is_stalled_comes_whole_once_it_flows(direction: str) -> None:
    async with proxied() as proxy, connected(proxy) as client:
        assert await client.echo(b"x") == b"x"
        proxy.stall(True, direction)  # type: ignore[arg-type] # one of the three
        client.writer.write(b"abc")
        assert not await arrives(client, 0.05)
        proxy.stall(False)
        assert await client.reader.readexactly(3) == b"abc"


async def test_a_stalled_way_pushes_back_and_the_other_flows() -> None:
    async with proxied() as proxy, connected(proxy) as client:
        proxy.stall(True, "up")
        client.writer.write(bytes(50_000_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.writer.drain()
        proxy.cut()
        with pytest.raises(ConnectionError):
            await client.writer.drain()


async def test_a_delay_is_that_of_a_longer_way_and_may_be_taken_back() -> None:
    async with proxied() as proxy, connected(proxy) as client:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        proxy.delay(0.03)
        assert await client.echo(b"x") == b"x"
        assert loop.time() - began >= 0.06
        proxy.delay(3600)
        client.writer.write(b"y")
        assert not await arrives(client, 0.05)
        proxy.delay(0)
        assert await client.reader.readexactly(1) == b"y"


async def test_a_slow_way_takes_its_time() -> None:
    async with proxied() as proxy, connected(proxy) as client:
        proxy.throttle(20_000, "down")
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        assert await client.echo(bytes(4000)) == bytes(4000)
        assert loop.time() - began >= 0.15
        proxy.throttle(1)
        client.writer.write(b"y" * 100)
        proxy.throttle(None)
        assert await client.reader.readexactly(100) == b"y" * 100


async def test_what_is_dropped_takes_its_connection_with_it_and_the_seed_says_when() -> None:
    async def pieces_until_cut(seed: int) -> int:
        async with proxied(seed) as proxy, connected(proxy) as client:
            proxy.drop(0.2)
            for count in range(1000):
                try:
                    await client.echo(b"x")
                except (ConnectionError, asyncio.IncompleteReadError):
                    return count
        return -1

    found = [await pieces_until_cut(seed) for seed in (1, 1, 2, 3)]
    assert found[0] == found[1] >= 0
    assert len(set(found)) > 1


async def test_a_target_that_is_away_resets_its_clients() -> None:
    async with proxied() as proxy:
        nowhere = FaultyProxy("127.0.0.1", proxy.port)
        await nowhere.start()
        proxy.refuse(True)
        async with connected(nowhere) as client:
            with pytest.raises(ConnectionResetError):
                await client.reader.readexactly(1)
        await nowhere.close()
