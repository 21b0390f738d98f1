"""Compiles all loops of numba when a router starts, before a request needs them."""

from __future__ import annotations

import engines.store
import indexer.warm_up
import publishers.rank
import router.scheduling.warm_up
from publishers.compiling import explained
from publishers.compiling_apart import compiled_apart
from router.scheduling.scheduler import Scheduler


def warm_up(scheduler: Scheduler, with_store: bool) -> None:
    """Takes seconds the first time on a machine, a fraction of one after; nothing else happens meanwhile."""
    with explained():
        with compiled_apart(("publishers.rank", "router.scheduling.warm_up")):
            indexer.warm_up.warm_up()
        publishers.rank.warm_up()
        router.scheduling.warm_up.warm_up(scheduler)
        if with_store:
            engines.store.warm_up()
