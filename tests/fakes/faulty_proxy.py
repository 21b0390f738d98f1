"""A TCP proxy that goes wrong when it is told to: between a client and its broker, or a router and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Literal

Direction = Literal["up", "down", "both"]
"""up: from the client to the target."""

_PIECE = 16 * 1024
_QUEUE = 16
"""Pieces under way in one direction of one connection: a sender that goes on feels the back pressure."""
_RESET = struct.pack("ii", 1, 0)
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FaultyProxy:
    """Listens on `port` of 127.0.0.1 between `start` and `close`, or `async with`. Bytes stay in order: this is TCP.

    Faults hold for connections there are and those to come, until they are taken back; several may hold at once.
    """

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        self.port = 0
        self.accepted = 0
        """Connections since the start, cut ones included."""
        self._target = target_host, target_port
        self._random = random.Random(seed)
        self._ways = {"up": _Way(), "down": _Way()}
        self._drop = 0.0
        self._holder: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._open)

    async def __aenter__(self) -> FaultyProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        # Never listens: keeps the port ours while nobody may connect.
        self._holder = _bound(self.port)
        self.port = self._holder.getsockname()[1]
        self.refuse(False)

    async def close(self) -> None:
        self.refuse(True)
        ending = self.cut()
        if self._holder:
            self._holder.close()
            self._holder = None
        await asyncio.gather(*ending, return_exceptions=True)

    def refuse(self, on: bool) -> None:
        """New connections are refused, as where no process listens; those there are go on."""
        loop = asyncio.get_running_loop()
        if on and self._listener:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        elif not on and not self._listener:
            self._listener = _bound(self.port)
            self._listener.listen()
            loop.add_reader(self._listener, self._accept, self._listener)

    def cut(self) -> list[asyncio.Task[None]]:
        """Resets all connections; both ends see it at once. Returns what will have ended then."""
        ending = list(self._open)
        for task in ending:
            task.cancel()
        return ending

    def stall(self, on: bool, direction: Direction = "both") -> None:
        """Nothing passes, and nothing is lost: what TCP makes of a partition, in one direction or both."""
        for way in self._ways_of(direction):
            way.stalled = on
            way.wake()

    def delay(self, seconds: float, jitter: float = 0.0, direction: Direction = "both") -> None:
        """Every byte comes `seconds` later, and up to `jitter` more."""
        for way in self._ways_of(direction):
            way.delay, way.jitter = seconds, jitter
            way.wake()

    def throttle(self, bytes_per_second: float | None, direction: Direction = "both") -> None:
        """For each connection; None: as fast as it goes."""
        for way in self._ways_of(direction):
            way.pace = bytes_per_second
            way.wake()

    def drop(self, chance: float) -> None:
        """With this chance (0-1), drawn for each piece that arrives, its connection is reset and the piece lost."""
        self._drop = chance

    def _ways_of(self, direction: Direction) -> Iterator[_Way]:
        return (way for name, way in self._ways.items() if direction in (name, "both"))

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            near, _ = listener.accept()
            near.setblocking(False)
            self.accepted += 1
            task = asyncio.create_task(self._carry(near), name=f"faulty proxy to {self._target[1]}")
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _carry(self, accepted: socket.socket) -> None:
        near = await asyncio.open_connection(sock=accepted)
        ends = [near[1]]
        clean = False
        try:
            far = await asyncio.open_connection(*self._target)
            ends.append(far[1])
            async with asyncio.TaskGroup() as group:
                self._pump(group, near, far, self._ways["up"])
                self._pump(group, far, near, self._ways["down"])
            clean = True
        except* OSError:
            pass
        finally:
            for end in ends:
                _end(end, clean)
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    def _pump(self, group: asyncio.TaskGroup, source: _Streams, sink: _Streams, way: _Way) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE)
        group.create_task(self._take(source[0], pieces, way))
        group.create_task(way.give(pieces, sink[1]))

    async def _take(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], way: _Way) -> None:
        data = b"?"
        while data:
            await way.flows()
            data = await reader.read(way.piece)
            if self._random.random() < self._drop:
                raise ConnectionResetError
            await pieces.put((asyncio.get_running_loop().time() + way.jitter * self._random.random(), data))


class _Way:
    """One direction of all connections."""

    def __init__(self) -> None:
        self.stalled = False
        self.delay = self.jitter = 0.0
        self.pace: float | None = None
        self._changed = asyncio.Event()

    @property
    def piece(self) -> int:
        """A slow way is slow from its first byte on, not in steps of seconds."""
        return _PIECE if self.pace is None else max(1, min(_PIECE, int(self.pace / 20)))

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def flows(self) -> None:
        while self.stalled:
            await self._changed.wait()

    async def give(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            arrived, data = await pieces.get()
            await self._pass(arrived, lambda: self.delay)
            await self.flows()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            await self._pause(len(data))

    async def _pause(self, written: int) -> None:
        await self._pass(asyncio.get_running_loop().time(), lambda: written / self.pace if self.pace else 0.0)

    async def _pass(self, since: float, wait: Callable[[], float]) -> None:
        """Returns `wait()` seconds after `since`, however that changes meanwhile."""
        loop = asyncio.get_running_loop()
        while (left := since + wait() - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setblocking(False)
    bound.bind(("127.0.0.1", port))
    return bound


def _end(writer: asyncio.StreamWriter, clean: bool) -> None:
    if clean:
        writer.close()
        return
    connection: socket.socket | None = writer.get_extra_info("socket")  # None: the other end has closed it
    if connection:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
