"""Compiles the loops of numba that a router needs when it starts, before a request needs them."""

from __future__ import annotations

import engines.store
import indexer.warm_up
import publishers.rank
import router.scheduling.warm_up
from publishers.compiling import explained
from publishers.compiling_apart import compiled_apart
from router.scheduling.scheduler import Scheduler


def warm_up(scheduler: Scheduler, with_store: bool, *, prompts: bool = True, engine_events: bool = True) -> None:
    """Takes seconds the first time on a machine, a fraction of one after; nothing else happens meanwhile. `prompts`:
    whether any are looked up in the index. `engine_events`: whether this process reads engines' own events."""
    with explained():
        if prompts:
            further = ("publishers.rank",) if engine_events else ()
            with compiled_apart((*further, "router.scheduling.warm_up")):
                indexer.warm_up.warm_up()
        if engine_events:
            publishers.rank.warm_up()
        router.scheduling.warm_up.warm_up(scheduler)
        if with_store:
            engines.store.warm_up()
