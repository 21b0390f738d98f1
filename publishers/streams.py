"""The standard streams of what serves: it goes on where they are closed, or lead to where there is no room."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO

from publishers.logs import log_event

logger = logging.getLogger("publishers.streams")


def open_standard_streams() -> None:
    """Open those that whoever started this process has closed. Their numbers would go to sockets, which libuv aborts
    at and into which would be written what is meant for people."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has taken the least number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale of old may lack what tables and help are written with
        sys.stdout.reconfigure(errors="replace")


def say(line: str) -> None:
    """Write `line` to standard output at once, or to the log where that cannot be."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        lose_output()
        reason = error.strerror or str(error)
        log_event(logger, logging.WARNING, "Standard output cannot be written to", reason=reason, line=line)


def lose_output() -> None:
    """Else what is left there is tried again at the end, which then counts as failed."""
    sys.stdout = _nowhere()


def take_output() -> int:
    """A file descriptor of what standard output was. From now on that is standard error: whoever reads this process's
    answers there would take what a library prints for one of them, or leave it until the pipe is full."""
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def leads_nowhere(stream: TextIO) -> bool:
    """Whether it was closed when this process started, or has been lost since."""
    return getattr(stream, "name", None) == os.devnull


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
