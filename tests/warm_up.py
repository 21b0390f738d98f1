"""Compiles numba's loops before the tests, who then find them kept: on a busy machine that takes a minute, which is all
that a test has."""

from __future__ import annotations

import logging
import random

import engines.sim.answers
import router.warm_up
from router.scheduling.balance import LeastLoaded
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler
from router.tokens import read_ids

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s ...")
    router.warm_up.warm_up(Scheduler(LeastLoaded(), LoadBook(), random.Random(0)), with_store=True)
    engines.sim.answers.warm_up()
    read_ids(b"[1]")
