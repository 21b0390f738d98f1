"""The processes of a run. Each is ended by its own pid, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
"""The router compiles for long when it is the first time on a machine."""


class Actor:
    """`python -m …`, that can be killed, stopped and started again. Its log goes on in one file."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.name = name
        self.arguments = arguments
        self.log_path = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, self.name
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    async def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self.arguments,
                cwd=ROOT,
                env={**environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )

    async def first_line(self) -> str:
        """What it prints when it is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended at once: {self.log[-2000:]}")
        return line.decode()

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    async def ended(self, within: float = START_SECONDS) -> int:
        """Its exit status. TimeoutError."""
        assert self._process is not None
        async with asyncio.timeout(within):
            return await self._process.wait()

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    async def close(self) -> None:
        if self.alive:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await self.ended(5)
            await self.kill()

    # -- what the kernel knows of it

    @property
    def children(self) -> list[int]:
        return [int(child) for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def megabytes(self) -> float:
        """Resident."""
        return megabytes(self.pid)


def megabytes(pid: int) -> float:
    """Resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_ports(offsets: Iterable[int]) -> int:
    """A port that is free, as are those that lie `offsets` behind it; below those that the kernel gives to clients.

    No seed chooses it: two runs with the same one would get in each other's way.
    """
    wanted = tuple(offsets)
    for _ in range(200):
        port = random.randrange(12_000, 31_000)
        if all(_is_free(port + offset) for offset in wanted):
            return port
    raise OSError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
