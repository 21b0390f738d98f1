"""The child processes of a run: a simulated fleet and a router, started for each mode and ended by process id."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO

import msgspec

from router.ab import workers as engines
from router.ab.errors import RunError
from router.settings import VARIABLE_PREFIX

_STARTING, _STOPPING = 120.0, 15.0
"""Seconds within which a child must be up, and must end after SIGTERM before it is killed."""
_LISTENING = "Listening on "


class _Ready(msgspec.Struct):
    workers: list[str]


class Child:
    """A running process. Its stdout is read by line; its stderr goes to a file that is read only after a failure."""

    def __init__(self, name: str, process: Process, log: IO[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - narrows the type
        self.name, self.process, self.stdout, self._log = name, process, process.stdout, log

    async def line(self) -> str:
        """The next line of stdout. Raises RunError when the process ended instead."""
        text = await self.stdout.readline()
        if not text:
            await self.process.wait()
            raise self.failure(f"ended with status {self.process.returncode} before it was up")
        return text.decode(errors="replace")

    async def watch(self) -> None:
        """Reads the rest of stdout, so that the child is never blocked writing it. Raises RunError when it ends."""
        while await self.stdout.read(1 << 16):
            pass
        await self.process.wait()
        self.check()

    def check(self) -> None:
        """Raises RunError when it has ended."""
        if self.process.returncode is not None:
            raise self.failure(f"ended with status {self.process.returncode} during the run")

    def failure(self, what: str) -> RunError:
        """An error with `what` happened, and the last line of the process's stderr."""
        self._log.seek(0)
        said = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return RunError(f"{self.name} {what}" + (f"; it said: {said[-1].strip()}" if said else ""))


@asynccontextmanager
async def fleet(flags: Sequence[str]) -> AsyncIterator[list[str]]:
    """A simulated fleet (`python -m engines.sim` with `flags`); yields its workers' URLs. Raises RunError."""
    async with _child("the simulated fleet", ["-m", "engines.sim", *flags]) as child:
        async with _within(_STARTING, child):
            while (urls := _read_workers(await child.line())) is None:
                pass
        async with _running(child):
            yield urls


@asynccontextmanager
async def router(mode: str, workers: Sequence[str], flags: Sequence[str]) -> AsyncIterator[str]:
    """A router in `mode` on a free port; yields its URL once /ready answers 200. Raises RunError."""
    named = [part for worker in workers for part in ("--worker", worker)]
    command = ["-m", "router", "--router-mode", mode, "--port", "0", *named, *flags]
    async with _child(f"the router ({mode})", command) as child:
        async with _within(_STARTING, child):
            while not (url := read_listening(await child.line())):
                pass
        async with _running(child):
            async with _within(_STARTING, child):
                await engines.until_ready(url)
            yield url


def _read_workers(line: str) -> list[str] | None:
    try:
        return msgspec.json.decode(line, type=_Ready).workers
    except msgspec.DecodeError:
        return None


def read_listening(line: str) -> str:
    """The URL in a router's line `Listening on URL`, or an empty string."""
    return line.strip().partition(_LISTENING)[2].rstrip("/")


@asynccontextmanager
async def _child(name: str, arguments: Sequence[str]) -> AsyncIterator[Child]:
    """Starts a process in a session of its own, so that Ctrl-C at the terminal reaches it only through this process."""
    # It imports what this process would: without -P also what lies in the working folder. Each setting is a flag: those
    # of a router that is served from here would change all that are compared, and the report's command tells none.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    path = {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", *arguments, stdout=PIPE, stderr=log, start_new_session=True, env=path
        )
        child = Child(name, process, log)
        try:
            yield child
        finally:
            await _end(process)


@asynccontextmanager
async def _within(seconds: float, child: Child) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise child.failure(f"was not up after {seconds:g} s") from None


@asynccontextmanager
async def _running(child: Child) -> AsyncIterator[None]:
    """Raises RunError as soon as the child ends: the rest of a run may take hours, and would measure nothing."""
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(child.watch())
            yield
            child.check()
            watch.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _end(process: Process) -> None:
    """SIGTERM, then SIGKILL to what is left of the child's own session; a second Ctrl-C kills at once."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOPPING):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError) as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, asyncio.CancelledError):
            raise
