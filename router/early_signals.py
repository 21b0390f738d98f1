"""SIGHUP, which reloads the settings: where it comes before the event loop handles it, it waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

_waiting: list[int] = []


def hold_hangups() -> None:
    """To be called before the settings are read: from now on a SIGHUP waits for `take_hangups`."""
    _waiting.clear()
    signal.signal(signal.SIGHUP, lambda number, _: _waiting.append(number))


def take_hangups(take: Callable[[], None]) -> None:
    """Call `take` for each SIGHUP from now on, and at once if one has waited."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, take)
    if _waiting:
        _waiting.clear()
        take()
