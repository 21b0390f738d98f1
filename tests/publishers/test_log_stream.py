"""Logs hold nobody up, and say what is missing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import pytest

from publishers.log_stream import LogStream


class Pipe:
    """A handler that writes into a pipe, and who reads it."""

    def __init__(self) -> None:
        self.end, into = os.pipe()
        os.set_blocking(self.end, False)
        self._into = os.fdopen(into, "w")
        self._handler = LogStream(self._into)

    def log(self, text: str) -> None:
        self._handler.emit(logging.makeLogRecord({"msg": text}))

    def fill(self) -> None:
        while self._handler._has_room():
            self._into.write("x" * 512)
            self._into.flush()

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.end, 1 << 20).decode()
        return ""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may be closed
            self._into.close()
        with contextlib.suppress(OSError):
            os.close(self.end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_lines_for_which_there_is_no_room_are_lost_and_counted(pipe: Pipe) -> None:
    pipe.fill()
    pipe.log("one")
    pipe.log("two")
    assert set(pipe.read()) == {"x"}
    pipe.log("three")
    assert pipe.read() == "Lines of the log were lost, since nobody read them\nthree\n"


@pytest.mark.parametrize("letter", ["a", "€", "😀"])
def test_a_line_longer_than_all_the_room_there_is(pipe: Pipe, letter: str) -> None:
    pipe.log(letter * 1_000_000)
    assert set(pipe.read()) == {letter}
    pipe.log("next")
    assert pipe.read() == "\nLines of the log were lost, since nobody read them\nnext\n"


@pytest.mark.parametrize("letter", ["a", "€"])
def test_a_long_line_is_written_whole(pipe: Pipe, letter: str) -> None:
    pipe.log(letter * 10_000)
    assert pipe.read() == letter * 10_000 + "\n"


def test_nobody_is_there_to_read(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    os.close(pipe.end)
    pipe.log("one")
