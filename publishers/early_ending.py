"""A signal that comes before the event loop handles it ends the process at once, as nothing has begun that would have
to be ended.

Its handler raises, and what is raised where LLVM calls back while numba compiles goes no further: Python tells of it,
and goes on. It is raised again then.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn

_SOON = 0.01
"""Seconds until it is raised again: outside of the callback, which is short."""


class _Ended(SystemExit):
    """By SIGTERM."""


def end_at_sigterm() -> None:
    """To be said explicitly: the first process of a container gets no signal that it does not handle. From now on
    Ctrl-C is raised again too."""
    signal.signal(signal.SIGTERM, _end)
    if getattr(sys.unraisablehook, "func", None) is not _raise_again:
        sys.unraisablehook = partial(_raise_again, sys.unraisablehook)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 -- a signal's handler
    raise _Ended(0)


def _raise_again(tell: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs) -> None:
    """`tell`: what is done with all others that are lost."""
    if lost.exc_type is _Ended:
        signal.signal(signal.SIGALRM, _end)
    elif lost.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    else:
        tell(lost)
        return
    signal.setitimer(signal.ITIMER_REAL, _SOON)
