"""SIGHUP asks for the settings to be read again. Before the event loop takes it, it would end the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

_waiting: list[int] = []


def hold_hangups() -> None:
    """Before the settings are read: one that comes from now on waits for `take_hangups`."""
    _waiting.clear()
    signal.signal(signal.SIGHUP, lambda number, _: _waiting.append(number))


def take_hangups(take: Callable[[], None]) -> None:
    """`take` is called for each, and for what has waited."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, take)
    if _waiting:
        _waiting.clear()
        take()
