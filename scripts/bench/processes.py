"""Child processes: started with their output in a file, waited for, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from router.settings import VARIABLE_PREFIX

from .places import ROOT, cache_folder


class CannotStart(Exception):
    """A process did not come up; the message says what it said last."""


_SETTINGS = (VARIABLE_PREFIX, "DYN_")
"""How the variables begin that would tune our router, or Dynamo, without the page telling it."""


class Child:
    """`name` also names its log in the cache folder, where the log of the one before stays too."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = cache_folder() / "logs" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".before.log"))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_untuned(), **(environment or {})},
                cwd=ROOT,
                start_new_session=True,  # so that its own children can be ended with it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout: float = 60.0) -> None:
        """Raises CannotStart when it ends first or takes too long."""
        deadline = time.monotonic() + timeout
        while not ready():
            if self._process.poll() is not None:
                raise CannotStart(f"{self.name} ended with {self._process.returncode}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise CannotStart(f"{self.name} was not ready after {timeout:g} s: {self.last_words()}")
            time.sleep(0.1)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def last_words(self) -> str:
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-400:]

    def stop(self) -> None:
        """With all that it has started, even where it has ended itself. Interrupted, it kills at once."""
        try:
            self._process.terminate()
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its own session, started above
            self._process.wait()


def _untuned() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}


def interrupt_on_signals() -> None:
    """SIGTERM, and a terminal that is gone, end what was started too, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`
            signal.signal(number, signal.default_int_handler)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status(url: str, body: bytes | None = None) -> int:
    """Of an answer; 0 when there is none."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()
            code: int = answer.status
            return code
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def python_of(venv: Path) -> str:
    return str(venv / "bin" / "python")
