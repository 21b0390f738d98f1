"""One of several router processes: what it is told, and what it shares with the others."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.types import WorkerRank
from router.scheduling.figures import BACKLOG_ROWS, LOAD_ROWS
from router.scheduling.load import SharedTable
from router.settings import Settings

RANKS_PER_WORKER = 512
"""Columns set aside for each worker, since nobody knows its data-parallel size before it answers."""
ANSWER_TIMEOUT = 2.0
"""Seconds that another process has to tell its metrics."""


class Member(msgspec.Struct, frozen=True):
    """One of the processes, and what it shares with the others."""

    number: int
    count: int
    memory: int
    """File descriptor of the shared books."""
    folder: str
    """Where each process has a socket on which it tells the others its metrics."""


class Start(msgspec.Struct):
    """What a process is told on its standard input, as one line."""

    settings: Settings
    member: Member


class Books(NamedTuple):
    """What the processes keep together."""

    load: SharedTable
    backlog: SharedTable


def shared_books(settings: Settings, member: Member) -> Books:
    """As `member` sees them."""
    tables = map_books(member.memory, settings, member.count)
    bases = {worker.worker_id: number * RANKS_PER_WORKER for number, worker in enumerate(settings.workers)}

    def place_of(rank: WorkerRank) -> int:
        if rank.dp_rank >= RANKS_PER_WORKER:
            raise ValueError(f"{rank} is beyond the {RANKS_PER_WORKER} ranks of a worker that --processes can share.")
        return bases[rank.worker_id] + rank.dp_rank

    load, backlog = tables[:, :LOAD_ROWS], tables[:, LOAD_ROWS:]
    return Books(SharedTable(load, member.number, place_of), SharedTable(backlog, member.number, place_of))


def books_shape(settings: Settings, count: int) -> tuple[int, int, int]:
    """The last column of each table belongs to nobody."""
    return count, LOAD_ROWS + BACKLOG_ROWS, len(settings.workers) * RANKS_PER_WORKER + 1


def map_books(descriptor: int, settings: Settings, count: int) -> npt.NDArray[np.int64]:
    shape = books_shape(settings, count)
    return np.frombuffer(mmap.mmap(descriptor, 8 * int(np.prod(shape))), np.int64).reshape(shape)


class Sockets:
    """Each process tells its metrics on a socket of its own, and asks the others on theirs."""

    def __init__(self, member: Member, tell: Callable[[], bytes]) -> None:
        self._member = member
        self._tell = tell
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = _socket_of(self._member.folder, self._member.number)
        path.unlink(missing_ok=True)  # a process before this one ended without cleaning up
        self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        if self._server:
            self._server.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self._tell())
            await writer.drain()
        writer.close()

    async def everybodys(self) -> dict[int, bytes]:
        """What each process tells, by its number; without those that do not answer."""
        told = await asyncio.gather(*(self._ask(number) for number in range(self._member.count)))
        return {number: text for number, text in enumerate(told) if text}

    async def _ask(self, number: int) -> bytes:
        if number == self._member.number:
            return self._tell()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT):
                reader, writer = await asyncio.open_unix_connection(_socket_of(self._member.folder, number))
                with contextlib.closing(writer):
                    return await reader.read()
        return b""


def _socket_of(folder: str, number: int) -> Path:
    return Path(folder) / str(number)


async def parent_ended() -> None:
    """Returns when standard input ends, which the parent keeps open as long as it lives."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> int:
    """A process's whole life; what it is to do stands in the first line of its standard input."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as told:  # not a byte beyond the line
        start = msgspec.json.decode(told.readline(), type=Start)
    from router.app import run  # noqa: PLC0415 -- it imports this module

    return run(start.settings, member=start.member)
