"""One of several router processes: how its parent starts it, and what it shares with the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import mmap
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from publishers.early_ending import end_at_sigterm
from publishers.streams import take_output
from router.cli import Source
from router.early_signals import hold_hangups
from router.processes.columns import Columns
from router.processes.heartbeat import Beats, Heartbeat
from router.processes.sent import WORDS, SentPrompts
from router.scheduling.figures import BACKLOG_ROWS, LOAD_ROWS
from router.scheduling.load import SharedTable
from router.settings import Settings

_WORD = 8
"""Bytes."""
AT_ONCE: Final = signal.SIGUSR1
"""From the parent: end at once. A second SIGTERM does not say so: systemd, for one, sends it to all processes, and the
parent passes its own on."""
ANSWER_TIMEOUT = 2.0
"""Seconds that another process has to answer with its metrics."""
_END = b"# EOF\n"
"""How a whole page ends. A process may end in the middle of one, and half a line would spoil the page of all."""


class Member(msgspec.Struct, frozen=True):
    """One of the processes, and where it finds what it shares with the others."""

    number: int
    count: int
    columns: int
    """The most ranks that there can be at a time."""
    memory: int
    """File descriptor of the shared memory."""
    folder: str
    """Folder in which each process has a socket that answers with its metrics."""
    output: int = 1
    """File descriptor on which the parent is told that the process listens."""


class Start(msgspec.Struct):
    """The one line that a process gets on its standard input, as JSON."""

    settings: Settings
    member: Member
    argv: list[str]
    """The router's arguments, to read the settings again."""
    port: int
    """As the operator stated it; that of `settings` is the one that the parent has found free for all processes."""
    event_plane: str
    """As the operator stated it; that of `settings` leads to the server that the parent may have started."""

    def line(self) -> bytes:
        # msgspec's own JSON takes no names of files that are not UTF-8.
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"


def read_start(line: bytes) -> Start:
    return msgspec.convert(json.loads(line), Start)


class Shared(NamedTuple):
    """The shared tables as one of the processes sees them."""

    load: SharedTable
    backlog: SharedTable
    sent: SentPrompts
    heartbeat: Heartbeat


class Memory(NamedTuple):
    """The shared memory as arrays; zeros at first."""

    names: npt.NDArray[np.uint64]
    books: npt.NDArray[np.int64]
    """For each process several rows, the first of which says which columns it uses; a column for each rank, and one
    that belongs to none."""
    rings: npt.NDArray[np.uint64]
    """The rings of `SentPrompts`, one for each process."""
    beats: Beats


def share(member: Member) -> Shared:
    names, books, rings, beats = map_memory(member.memory, member.count, member.columns)
    own = member.number
    columns = Columns(names, books[:, 0, :-1], own, member.memory)
    load, backlog = (
        SharedTable(rows, own, columns.claim, columns.release)
        for rows in (books[:, 1 : LOAD_ROWS + 1], books[:, LOAD_ROWS + 1 :])
    )
    return Shared(load, backlog, SentPrompts(rings, own, columns), Heartbeat(beats, own))


def memory_size(count: int, columns: int) -> int:
    """Bytes."""
    return _WORD * (columns + math.prod(_books_shape(count, columns)) + count * WORDS + count)


def map_memory(descriptor: int, count: int, columns: int) -> Memory:
    words = np.frombuffer(mmap.mmap(descriptor, memory_size(count, columns)), np.int64)
    shape = _books_shape(count, columns)
    sizes = columns, math.prod(shape), count * WORDS
    names, books, rings, beats = np.split(words, np.cumsum(sizes))
    return Memory(names.view(np.uint64), books.reshape(shape), rings.view(np.uint64).reshape(count, WORDS), beats)


def _books_shape(count: int, columns: int) -> tuple[int, int, int]:
    return count, 1 + LOAD_ROWS + BACKLOG_ROWS, columns + 1


class Sockets:
    """Serves this process's metrics on a socket, and asks the other processes for theirs; tells the parent that it
    listens."""

    def __init__(self, member: Member, page: Callable[[], Awaitable[bytes]]) -> None:
        self._member = member
        self._page = page
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = _socket_of(self._member.folder, self._member.number)
        path.unlink(missing_ok=True)  # a process before this one ended without cleaning up
        self._server = await asyncio.start_unix_server(self._answer, path)

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            os.write(self._member.output, f"{line}\n".encode())

    def close(self) -> None:
        if self._server:
            self._server.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(await self._page() + _END)
            await writer.drain()
        writer.close()

    async def metrics_of_all(self) -> dict[int, bytes]:
        """The metrics of all processes that answer with all of them, by process number."""
        told = await asyncio.gather(*(self._ask(number) for number in range(self._member.count)))
        return {number: text for number, text in enumerate(told) if text}

    async def _ask(self, number: int) -> bytes:
        if number == self._member.number:
            return await self._page()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT):
                reader, writer = await asyncio.open_unix_connection(_socket_of(self._member.folder, number))
                with contextlib.closing(writer):
                    page = await reader.read()
                return page.removesuffix(_END) if page.endswith(_END) else b""
        return b""


def _socket_of(folder: str, number: int) -> Path:
    return Path(folder) / str(number)


async def parent_ended() -> None:
    """Returns when standard input ends: the parent keeps it open for as long as it lives."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> int:
    """Runs a process; the first line of its standard input says how (see `Start`)."""
    end_at_sigterm()
    hold_hangups()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as told:  # not a byte beyond the line
        start = read_start(told.readline())
    member = msgspec.structs.replace(start.member, output=take_output())
    from router.serve import run  # noqa: PLC0415 -- it imports this module

    settings = start.settings
    decided = {"port": (start.port, settings.port), "event_plane": (start.event_plane, settings.event_plane)}
    return run(settings, Source(start.argv, os.environ, decided), member)
