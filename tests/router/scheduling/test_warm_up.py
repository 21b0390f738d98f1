"""After warming up, a choice compiles nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router.scheduling import auto_costs, figures
from router.scheduling.auto import Auto
from router.scheduling.backlog import Backlog
from router.scheduling.candidates import Split
from router.scheduling.cheapest import Cheapest
from router.scheduling.figures import BACKLOG_ROWS, LOAD_ROWS
from router.scheduling.limits import Limits
from router.scheduling.load import LoadBook, SharedTable
from router.scheduling.room import Room
from router.scheduling.scheduler import Scheduler
from router.scheduling.warm_up import warm_up
from tests.router.scheduling.candidates import holding_on_gpu, named


def compiled() -> int:
    kernels = (
        auto_costs.auto_costs,
        auto_costs.memory_waits,
        figures.work_out,
        figures.sum_loads,
        figures.seconds_left,
    )
    return sum(len(getattr(kernel, "signatures", ())) for kernel in kernels)


@pytest.mark.parametrize("processes", [0, 2], ids=["alone", "one of two processes"])
def test_a_choice_after_warming_up_compiles_nothing(processes: int) -> None:
    candidates = named("ab")
    load, backlog = None, None
    if processes:
        books = np.zeros((processes, LOAD_ROWS + BACKLOG_ROWS, 3), np.int64)
        load, backlog = (
            SharedTable(rows, 0, candidates.ranks.index, lambda _: None)
            for rows in (books[:, :LOAD_ROWS], books[:, LOAD_ROWS:])
        )
    scheduler = Scheduler(Cheapest(Auto()), LoadBook(load), random.Random(0), Backlog(backlog))
    for rank in candidates.ranks:
        scheduler.watch(rank, 16)
    warm_up(scheduler)
    before = compiled()
    matches = holding_on_gpu({candidates.ranks[0]: 3})
    decision = scheduler.select(candidates, 100, matches, 1.0)
    scheduler.reserve(decision, 1.0).release(2.0)
    Room(Limits(max_worker_concurrency=1), scheduler.book).find(candidates, 2.0)
    scheduler.book.loads(candidates, 2.0)
    scheduler.backlog.seconds(candidates, np.ones(2), 2.0)
    near = np.ones(2, np.bool_)
    split = Split(candidates, (candidates,) * 2, (near,) * 2, (False,) * 2)
    scheduler.disaggregation.decode(scheduler, split, 0, 0.0, 100, matches, 2.0)
    assert compiled() == before > 0
