"""A SIGTERM that comes before the event loop handles it ends the process at once, as nothing has begun that would have
to be ended."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def end_at_sigterm() -> None:
    """To be said explicitly: the first process of a container gets no signal that it does not handle."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 -- a signal's handler
    raise SystemExit(0)
