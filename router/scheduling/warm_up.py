"""Compiles the kernels of policies and limits before the first request, for the types of array that they will get."""

from __future__ import annotations

import random

import numpy as np

from indexer.matches import SumOfMatches
from indexer.types import WorkerRank
from router.scheduling.auto import Auto
from router.scheduling.auto_costs import memory_waits
from router.scheduling.balance import LeastLoaded
from router.scheduling.candidates import Candidates
from router.scheduling.cheapest import Cheapest
from router.scheduling.load import LoadBook
from router.scheduling.present import Present
from router.scheduling.scheduler import Scheduler


def warm_up(scheduler: Scheduler | None = None) -> None:
    """Takes some seconds the first time on a machine; books nothing. None: for a router in one
    process."""
    scheduler = scheduler or Scheduler(LeastLoaded(), LoadBook(), random.Random(0))  # noqa: S311 -- not for secrets
    nobody = Candidates([(WorkerRank("", 0), 1)])
    present = Present(scheduler, nobody, 1, SumOfMatches(()), 0.0)
    Cheapest(Auto()).choose(present, random.Random(0))  # noqa: S311 -- not for secrets
    memory_waits(present.memory_tokens, present.overlap_tokens, 1, present.capacity_tokens, present.residence_seconds)
    scheduler.book.loads(nobody, 0.0)  # for requests that are routed by load only
    scheduler.backlog.seconds(nobody, np.ones(1), 0.0)
