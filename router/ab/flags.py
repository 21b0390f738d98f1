"""What the command lines of A/B runs and simulations share: the argparse parser, checks of numbers, and files."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console

from publishers.urls import is_host, split_url
from router.ab.errors import RunError

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """A parser that raises RunError for errors, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message}; --help lists every flag")


def taking(what: str, read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Wraps `read` so that argparse says what the flag takes: for a ValueError it would only name the function."""

    def checked(text: str) -> _T:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it takes {what}, not {text!r}") from None

    return checked


number = taking("a whole number", int)
_fraction = taking("a number", float)


def count(text: str) -> int:
    value = number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def positive(text: str) -> float:
    value = _fraction(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def whole(text: str) -> int:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def router_url(text: str) -> str:
    try:
        parts = split_url(text)
        _ = parts.port  # raises ValueError for what is no port number
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not is_host(parts.hostname or "") or re.search(r"\s", text):
        form = "it looks like http://HOST:PORT (http or https)"
        raise argparse.ArgumentTypeError(f"{text!r} is not a router's address; {form}")
    return text


def check_distinct(named: Mapping[str, str | None]) -> None:
    """Refuses flags that name one file, if by several names: what is written there later would be all that is left."""
    flags: dict[object, str] = {}
    for flag, path in named.items():
        other = flags.setdefault(_identity(path), flag) if path is not None else flag
        if other != flag:
            raise RunError(f"{other} and {flag} name the same file; give each its own")


def _identity(path: str) -> object:
    """The same for all names of a file. A terminal or a pipe may well be both read and written."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else path


def check_writable(flag: str, path: str | None) -> None:
    """Checks that the file that `flag` names can be written, before the run rather than after it. It leaves no empty
    one behind. A named pipe is not tried: its reader would take that for the end, and leave."""
    if path is None:
        return
    try:
        if Path(path).is_fifo():
            return
        there = os.path.exists(path)
        with Path(path).open("ab"):
            pass
        if not there:
            os.unlink(os.path.realpath(path))  # a link to nothing stays as it was
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; give {flag} another FILE") from None


def write_all(name: str, files: Mapping[str, bytes]) -> list[str]:
    """Writes what is kept of a run. Returns those that were written, and says which could not be: hours may lie behind
    it, and a disk may be full by now."""
    written = []
    for path, content in files.items():
        try:
            Path(path).write_bytes(content)
        except OSError as error:
            sys.stderr.write(f"{name}: cannot write {path}: {error.strerror}\n")
        else:
            written.append(path)
    return written


def tell_written(paths: Iterable[str], console: Console) -> None:
    for path in paths:
        console.print(f"Written to {path}", markup=False, highlight=False, soft_wrap=True)
