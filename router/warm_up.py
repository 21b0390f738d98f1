"""What is compiled when a router starts, before any request needs it; whoever waits for that is told why."""

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
"""Seconds: what an earlier start has kept is there in a fraction of one, and on a busy machine in one or two."""


def warm_up(scheduler: Scheduler, with_store: bool) -> None:
    """Takes seconds the first time on a machine, a fraction of one after; nothing else happens meanwhile."""
    with _told_after(PATIENCE, _tell):
        indexer.warm_up.warm_up()
        publishers.rank.warm_up()
        router.scheduling.warm_up.warm_up(scheduler)
        if with_store:
            engines.store.warm_up()


@contextmanager
def _told_after(seconds: float, tell: Callable[[], None]) -> Iterator[None]:
    """By a thread: what takes long blocks the event loop."""
    timer = threading.Timer(seconds, tell)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell() -> None:
    text = "Compiling what runs for each request: up to half a minute or so, at the first start only"
    hint = "set NUMBA_CACHE_DIR to a folder that lasts, if you see this at every start"
    log_event(logger, logging.INFO, text, hint=hint)
