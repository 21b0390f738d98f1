"""Writes logs to where nobody may read them for a while: a line that would have to wait is lost.

Whoever writes into a pipe or a socket that is full waits until its reader goes on: the event loop, and every stream
with it, for as long as a collector of logs stands still.
"""

from __future__ import annotations

import io
import logging
import os
import select
import stat
from typing import TextIO


class LogStream(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._room = _poll_of(stream)
        self._lost = 0
        self._in_line = False
        """Only the beginning of a line had room."""

    def emit(self, record: logging.LogRecord) -> None:
        if self._lost and self._has_room():
            lost, self._lost = self._lost, 0
            self._write_line(_of_lost(lost))
        self._write_line(record)

    def _write_line(self, record: logging.LogRecord) -> None:
        try:
            if not self._write(self.format(record) + self.terminator):
                self._lost += 1
        except Exception:  # noqa: BLE001 -- as every handler of the standard library
            self.handleError(record)

    def _write(self, text: str) -> bool:
        """Whether all of it was written, in pieces of which each fits where there is any room."""
        text = self.terminator + text if self._in_line else text
        size = len(text) if self._room is None else select.PIPE_BUF // (1 if text.isascii() else 4)
        for start in range(0, len(text), size):
            if not self._has_room():
                return False
            self._in_line = start + size < len(text)
            self.stream.write(text[start : start + size])
            self.flush()
        return True

    def _has_room(self) -> bool:
        return self._room is None or bool(self._room.poll(0))


def _poll_of(stream: TextIO) -> select.poll | None:
    """None: writing never waits."""
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:
        return None
    if stat.S_ISREG(os.fstat(number).st_mode):
        return None
    room = select.poll()
    room.register(number, select.POLLOUT)
    return room


def _of_lost(lines: int) -> logging.LogRecord:
    text = "Lines of the log were lost, since nobody read them"
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
    record.fields = {"lines": lines}
    return record
