"""How many files (connections are files) the process may have open."""

from __future__ import annotations

import contextlib
import logging
import resource
from typing import Final

from publishers.logs import log_event

logger = logging.getLogger(__name__)

_OF_ITS_OWN: Final = 100
"""Libraries, sockets to listen on, logs, a broker."""
_PER_WORKER: Final = 3
"""A health check, a load report, KV events."""
TOO_FEW = "The open files allowed hardly suffice for so many workers, and requests take two each: raise `ulimit -Hn`"


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
