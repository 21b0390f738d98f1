"""Says why a start takes long: numba compiles, and nothing else happens meanwhile."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from indexer.jit import all_kept
from publishers.logs import log_event

logger = logging.getLogger(__name__)

PATIENCE: Final = 3.0
"""Seconds until that is logged: with what an earlier start has kept it takes one or two at most, even under load."""


def explained() -> AbstractContextManager[None]:
    """In which loops are compiled."""
    return _log_after(PATIENCE, _log_why)


@contextmanager
def _log_after(seconds: float, log: Callable[[], None]) -> Iterator[None]:
    """From another thread, since this one compiles."""
    timer = threading.Timer(seconds, log)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log_why() -> None:
    when = "the first start only" if all_kept() else "every start: there is no folder to keep it in"
    hint = "set NUMBA_CACHE_DIR to a folder that lasts, or run 'kv-router compile' as the user who installs"
    if all_kept():
        hint += ", if you see this at every start"
    text = f"Compiling what runs for each request or event: up to half a minute or so, at {when}"
    log_event(logger, logging.INFO, text, hint=hint)


def sharing(folder: str) -> dict[str, str]:
    """The environment of several processes that are to compile but once. Where nothing can be kept for good, `folder`
    has it for as long as they run."""
    return {**os.environ} if all_kept() else {**os.environ, "NUMBA_CACHE_DIR": folder}
