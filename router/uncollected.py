"""Reads long texts while Python's garbage collector is off."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, TypeVar

_Text = TypeVar("_Text")
_Read = TypeVar("_Read")

_LONG: Final = 128 * 1024
"""Bytes, or letters."""


def uncollected(read: Callable[[_Text], _Read], text: _Text, size: int) -> _Read:
    """What `read` makes of `text`. The collector would look for garbage again and again in what a long one becomes: 16
    MB of empty lists would take ten times as long, while every stream waits. Raises as `read` does."""
    if size < _LONG or not gc.isenabled():
        return read(text)
    gc.disable()
    try:
        return read(text)
    finally:
        gc.enable()
