"""Compiles all loops of numba when a router starts, before a request needs them; logs why if that takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import engines.store
import indexer.warm_up
import publishers.rank
import router.scheduling.warm_up
from publishers.logs import log_event
from router.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

PATIENCE: Final = 3.0
"""Seconds until that is logged: with what an earlier start has kept it takes one or two at most, even under load."""


def warm_up(scheduler: Scheduler, with_store: bool) -> None:
    """Takes seconds the first time on a machine, a fraction of one after; nothing else happens meanwhile."""
    with _log_after(PATIENCE, _log_why):
        indexer.warm_up.warm_up()
        publishers.rank.warm_up()
        router.scheduling.warm_up.warm_up(scheduler)
        if with_store:
            engines.store.warm_up()


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
    text = "Compiling what runs for each request: up to half a minute or so, at the first start only"
    hint = "set NUMBA_CACHE_DIR to a folder that lasts, if you see this at every start"
    log_event(logger, logging.INFO, text, hint=hint)
