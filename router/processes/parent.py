"""Several routers on one port: a parent that starts them, keeps them running, and ends when they have ended.

They share what they have booked and sent through mapped memory, so that each sees the others' requests with its next
decision; all else (index, event plane, connections) each has for itself. The kernel spreads connections over them
(SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import BinaryIO, cast

from publishers.compiling import sharing
from publishers.connect import embedded_server
from publishers.embedded_nats import NatsServerError
from publishers.logs import configure_logging, log_event
from publishers.own_code import python_command
from publishers.streams import say
from router.cli import Source
from router.early_signals import take_hangups
from router.port import check_free
from router.processes.heartbeat import INTERVAL, Standstill
from router.processes.member import AT_ONCE, Member, Start, map_memory, memory_size
from router.reloading import follow, read_again
from router.security.security import check_security
from router.settings import Settings, SettingsError

logger = logging.getLogger("router.processes")

RESTART_DELAY = 1.0
"""Seconds between a process's end and its successor's start."""
GRACE = 10.0
"""Seconds beyond `--drain-timeout`, or after a second signal, that a process has to end before it is killed."""
_MEMBER = "from router.processes.member import main; sys.exit(main())"
LEAST_COLUMNS, COLUMNS_PER_WORKER = 4096, 16
"""Ranks that there may be at a time: as many as the workers that are stated may have, and as may join later."""


async def supervise(settings: Settings, source: Source) -> int:
    """Serve with `settings.processes` processes until a signal; returns the exit status."""
    try:
        reserved = _reserve(settings.host, settings.port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that none can be
        reason = f"Cannot listen: {getattr(error, 'strerror', None) or error}"
        log_event(logger, logging.ERROR, reason, host=settings.host, port=settings.port)
        return 1
    try:
        with reserved, _memory() as memory, tempfile.TemporaryDirectory(prefix="kv-router-") as folder:
            _check_sockets(folder, settings.processes)
            columns = max(LEAST_COLUMNS, COLUMNS_PER_WORKER * len(settings.workers))
            memory.truncate(memory_size(settings.processes, columns))
            port = reserved.getsockname()[1]
            async with _embedded_server(settings.event_plane) as plane:
                told = replace(settings, port=port, event_plane=plane)
                return await _Parent(settings, told, source, columns, memory, folder, reserved).run()
    except (NatsServerError, OSError) as error:  # OSError: no folder to write to
        log_event(logger, logging.ERROR, f"Cannot start: {error}")
        return 1


def _check_sockets(folder: str, count: int) -> None:
    """Raises OSError if the processes could not have their sockets there, which only the last would say."""
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.bind(f"{folder}/{count - 1}")
        except OSError as error:
            raise OSError(f"{folder}: no socket can be made there ({error}); set TMPDIR to a short path") from None


def _memory() -> BinaryIO:
    """A file to be mapped. Where there can be one in memory alone, no disk is written again and again."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("kv-router"), "r+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


@contextlib.asynccontextmanager
async def _embedded_server(plane: str) -> AsyncIterator[str]:
    """All processes share one NATS server, which outlives each of them. Yields the plane's URL for them."""
    if not plane.startswith("nats+embedded://"):
        yield plane
        return
    try:
        server = embedded_server(plane)
    except ValueError as error:
        raise NatsServerError(str(error)) from None
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


def _reserve(host: str, port: int) -> socket.socket:
    """Bound and not listening: it keeps the port for the processes, and gets no connections itself."""
    family, kind, protocol, address = check_free(host, port)
    reserved = socket.socket(family, kind, protocol)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind(address)
    except OSError:  # connections of a router that ran alone, which the kernel remembers for a minute
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    return reserved


class _Parent:
    def __init__(
        self,
        stated: Settings,
        settings: Settings,
        source: Source,
        columns: int,
        memory: BinaryIO,
        folder: str,
        reserved: socket.socket,
    ) -> None:
        """`settings`: what processes are told, in place of what was `stated`. `columns`: of `memory`, as in
        `memory_size`. `reserved`: keeps the port for processes that are started again."""
        self._stated = stated
        self._settings = settings
        self._source = source
        self._columns = columns
        self._memory = memory.fileno()
        self._folder = folder
        self._reserved = reserved
        memory_map = map_memory(self._memory, settings.processes, columns)
        self._books, self._standstill = memory_map.books, Standstill(memory_map.beats)
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._listening: set[int] = set()
        self._stopping = asyncio.Event()
        self._hung_up = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        take_hangups(self._on_hangup)
        # The first alone: where something has to be compiled, the others find it done.
        said = [await self._try_start(0)]
        others = range(1, self._settings.processes) if said[0] else ()
        said += await asyncio.gather(*map(self._try_start, others))
        silent = {number for number, line in enumerate(said) if not line}
        if silent:
            return await self._give_up(silent)
        say(said[0].rstrip("\n"))
        await self._keep_all()
        return 0

    async def _keep_all(self) -> None:
        watching = [asyncio.create_task(self._watch())]
        if self._settings.watch_config and (file := self._source.file):
            watching.append(asyncio.create_task(follow(file, self._follow)))
        await asyncio.gather(*(self._keep(number) for number in range(self._settings.processes)))
        for task in watching:
            task.cancel()

    async def _give_up(self, silent: set[int]) -> int:
        """Not all listen: `silent` do not. Returns the exit status, once all have ended."""
        stopped = self._stopping.is_set()
        if not stopped:  # else they were told, and those that serve may take their time
            self._on_signal()
        status = 0 if stopped else await self._failure(silent)
        for process in self._running.values():
            await process.wait()
        return status

    async def _failure(self, numbers: set[int]) -> int:
        """The exit status where these processes could not be started, or ended before they listened."""
        worst = 1
        for number in numbers & self._running.keys():
            status = await self._running[number].wait()
            worst = max(worst, status)
            if status <= 0:  # else it has told why
                log_event(logger, logging.ERROR, "A process ended before it listened", process=number, status=status)
        return worst

    def _on_signal(self) -> None:
        """Passed on each time: the first asks to drain, the second to end at once. Another router may have the port
        meanwhile."""
        again = self._stopping.is_set()
        timeout = 0.0 if again else self._settings.drain_timeout
        asyncio.get_running_loop().call_later(timeout + GRACE, self._kill)
        self._stopping.set()
        self._reserved.close()
        for process in self._running.values():
            _signal(process, AT_ONCE if again else signal.SIGTERM)

    async def _watch(self) -> None:
        """Kill those that stand still; they are started again as any that end."""
        while True:
            await asyncio.sleep(INTERVAL)
            for number in self._standstill.found(self._listening):
                log_event(logger, logging.ERROR, "A process stands still and is killed", process=number)
                _signal(self._running[number], signal.SIGKILL)

    def _kill(self) -> None:
        """End those that heed no signal: they stand still."""
        for number, process in self._running.items():
            if process.returncode is None:
                log_event(logger, logging.ERROR, "A process does not end and is killed", process=number)
                _signal(process, signal.SIGKILL)

    def _on_hangup(self) -> None:
        """Whoever listens reads the settings again. The parent does so itself, and that takes seconds where there are
        thousands of API keys: signals that come meanwhile go first, and further hangups count once."""
        if not self._hung_up:
            self._hung_up = True
            asyncio.get_running_loop().call_soon(self._reload)

    def _reload(self) -> None:
        self._hung_up = False
        if not self._stopping.is_set() and self._read_workers():
            for number in self._listening:
                _signal(self._running[number], signal.SIGHUP)

    async def _follow(self, _: bool) -> None:
        self._read_workers()

    def _read_workers(self) -> bool:
        """Whoever starts from now on is told of the workers as they are now, if those that run take them too. Returns
        whether that is so."""
        try:
            workers = read_again(self._source, self._stated)[0].workers
            check_security(self._stated)
        except SettingsError as error:
            log_event(logger, logging.ERROR, "The settings stay as they are", reason=error)
            return False
        self._settings = replace(self._settings, workers=workers)
        return True

    async def _try_start(self, number: int) -> str:
        """As `_start`; "" too where the system refuses another process. Were it raised, the starts beside it would be
        cancelled, which asyncio may take for ever to do."""
        try:
            return await self._start(number)
        except OSError as error:
            log_event(logger, logging.ERROR, "A process cannot be started", process=number, reason=error)
            return ""

    async def _start(self, number: int) -> str:
        """Returns what it says when it listens; "" when it ends before."""
        _keep_folder(self._folder)
        process = await asyncio.create_subprocess_exec(
            *python_command(_MEMBER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[self._memory],
            env=sharing(self._folder),
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which passes it on once
        )
        self._running[number] = process
        if self._stopping.is_set():  # the signal came while it was being started
            _signal(process, signal.SIGTERM)
        settings = self._settings
        member = Member(number, settings.processes, self._columns, self._memory, self._folder)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("pipes were asked for")
        start = Start(settings, member, list(self._source.argv), self._stated.port, self._stated.event_plane)
        process.stdin.write(start.line())
        listening = await process.stdout.readline()
        if listening:
            self._listening.add(number)
            if settings is not self._settings:  # a hangup came meanwhile
                _signal(process, signal.SIGHUP)
        return listening.decode()

    async def _keep(self, number: int) -> None:
        """Start it again whenever it ends of itself; what it had booked is void."""
        while True:
            status = await self._running[number].wait()
            self._listening.discard(number)
            self._books[number] = 0
            if self._stopping.is_set():
                return
            log_event(logger, logging.ERROR, "A process has ended and is started again", process=number, status=status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RESTART_DELAY)
                return
            if self._settings.watch_config:  # the others may have seen a change of this very second
                self._read_workers()
            await self._try_start(number)  # what ended it may last, as a lack of memory: the next turn tries again


def _keep_folder(folder: str) -> None:
    """Whoever tidies temporary files up may have removed it, and a process that cannot have its socket ends. Raises
    OSError where somebody else made one in its place, who could listen there, and change what numba keeps."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is no folder of this user's alone; remove it")


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # Its own `send_signal` reaps one that has just ended, whose status asyncio then takes for 255.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def run(settings: Settings, source: Source) -> int:
    try:
        check_security(settings)  # a shell's `<(…)` is there for the parent alone: no other could tell what is wrong
    except SettingsError as error:
        sys.stderr.write(f"kv-router: {error}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format)
    return asyncio.run(supervise(settings, source))
