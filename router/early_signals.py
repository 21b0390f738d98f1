"""Signals that come before the event loop handles them: SIGHUP, which reloads the settings, waits; SIGTERM ends the
process at once, as nothing has begun that would have to be ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

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


def end_at_sigterm() -> None:
    """To be said explicitly: the first process of a container gets no signal that it does not handle."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 -- a signal's handler
    raise SystemExit(0)
