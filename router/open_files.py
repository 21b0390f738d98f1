"""How many files (connections are files) the process may have open."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Callable
from typing import Final

from publishers.logs import Seldom, log_event

logger = logging.getLogger(__name__)

_OF_ITS_OWN: Final = 100
"""Libraries, sockets to listen on, logs, a broker."""
_PER_WORKER: Final = 3
"""A health check, a load report, KV events."""
TOO_FEW = "The open files allowed hardly suffice for so many workers, and requests take two each: raise `ulimit -Hn`"
NONE_LEFT = (
    "No more files can be opened: new connections are closed without an answer. Raise `ulimit -Hn`, or lower "
    "--max-connections"
)


def raise_limit() -> None:
    """Raise the limit of open files as far as the system lets us: each request takes two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_if_few(workers: int) -> None:
    """Log if the limit may be reached without any request."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _OF_ITS_OWN + _PER_WORKER * workers:
        log_event(logger, logging.WARNING, TOO_FEW, allowed=limit, workers=workers)


def can_open() -> bool:
    """Whether there is room for one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in {errno.EMFILE, errno.ENFILE}
    return True


class OpenFiles:
    """Logs when none are left: the event loop then closes new connections without a word."""

    def __init__(self, can_open: Callable[[], bool] = can_open) -> None:
        self._can_open = can_open
        self._lines = Seldom()

    def tick(self, now: float) -> None:
        """To be called once a second. `now`: seconds on a steady clock."""
        if self._lines.may(now) and not self._can_open():
            self._lines.said(now)
            log_event(logger, logging.WARNING, NONE_LEFT, allowed=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
