"""How the command lines of A/B runs and of simulations are read by argparse, and what numbers there must be."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from router.ab.errors import RunError

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """Raises RunError for what is wrong, where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message}; --help lists every flag")


def taking(what: str, read: Callable[[str], _T]) -> Callable[[str], _T]:
    """`read`, and where it raises ValueError a sentence: argparse would show the function's name."""

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
