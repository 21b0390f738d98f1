"""Child processes with a log file, in a process group of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE = 20.0
LOG_TAIL = 3000


class Process:
    """One command that can be started again. Engines have children of their own, hence the group."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.log = log

    def start(self) -> None:
        assert self._process is None
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left after the grace time."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            print(f"{self._command[:4]} took longer than {GRACE:g} s to stop", file=sys.stderr)  # noqa: T201 - for the test's report
        self.kill()

    def freeze(self) -> None:
        """All processes of the group stand still."""
        os.killpg(self.group, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.group, signal.SIGCONT)

    def kill(self) -> None:
        """As when a machine dies: no goodbye from any process of the group."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    @property
    def group(self) -> int:
        """Of processes, its own among them."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def output(self) -> str:
        """What it wrote since its last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def assert_running(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"{self._command[:4]} ended with {code}:\n{self.output()[-LOG_TAIL:]}"


def free_port(*offsets: int) -> int:
    """A port that is free, as are the ones at `offsets` from it; below the range that the system hands out itself."""
    start = 20000 + os.getpid() % 5000
    taken = free_port.__dict__.setdefault("given", set())
    for port in range(start, 32000):
        wanted = {port, *(port + offset for offset in offsets)}
        if not wanted & taken and all(_is_free(p) for p in wanted):
            taken |= wanted
            return port
    raise AssertionError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
