"""Compiles with several processors at the first start: numba compiles one function at a time in a process, but keeps
what it has compiled on disk, where another process finds it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from numba.core import event

from indexer.jit import all_kept
from publishers.own_code import python_command

_PATIENCE: Final = 120.0
"""Seconds until a process that compiles is given up; what it should have compiled is then compiled here."""


@contextmanager
def compiled_apart(modules: Sequence[str]) -> Iterator[None]:
    """As soon as anything has to be compiled here, call `warm_up()` of each of `modules` in a process of its own. At
    the end these have ended. Where nothing can be kept, they would help nobody."""
    helpers = _Helpers(modules if (os.cpu_count() or 1) > 1 and all_kept() else ())
    event.register("numba:compile", helpers)  # type: ignore[no-untyped-call]
    try:
        yield
        helpers.wait()
    finally:
        event.unregister("numba:compile", helpers)  # type: ignore[no-untyped-call]
        helpers.end()


class _Helpers(event.Listener):
    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._started: list[subprocess.Popen[bytes]] = []

    def on_start(self, event: Any) -> None:  # noqa: ARG002 -- numba's signature
        modules, self._modules = self._modules, ()
        with suppress(OSError):  # no more processes are allowed: all is compiled here
            self._started.extend(map(_start, modules))

    def on_end(self, event: Any) -> None:
        """Nothing."""

    def wait(self) -> None:
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def _start(module: str) -> subprocess.Popen[bytes]:
    # Whatever goes wrong there goes wrong here too, and is told here.
    quiet = subprocess.DEVNULL
    command = python_command(f"import {module}; {module}.warm_up()")
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 -- this program's own modules
