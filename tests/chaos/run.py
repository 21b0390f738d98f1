"""One scenario, from the start of its processes to the last look at what they left."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Ledger
from tests.chaos.load import Load
from tests.chaos.scenarios import Scenario
from tests.chaos.schedule import Schedule
from tests.chaos.settling import Settling
from tests.chaos.ward import Ward

ROUND = 60.0
"""Seconds after which a long run comes to rest and is looked at."""
MOST_UNSERVED = 0.001
"""Share of requests that may be refused while a worker is well: both that a request was tried at fell ill meanwhile."""


async def run_scenario(scenario: Scenario, seconds: float, seed: int, folder: Path) -> Ledger:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that all processes are ended
    ledger = Ledger(scenario.name)
    draw = random.Random(f"{seed}/{scenario.name}")
    async with Fleet(scenario, folder) as fleet:
        settling, number = Settling(fleet, ledger), 0
        await _warm_up(fleet, scenario, ledger, seed)
        await settling.check()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 1 and not ledger.violations:
            number += 1
            await _round(fleet, scenario, ledger, min(ROUND, left), draw, f"{seed}/{scenario.name}/{number}")
            await settling.check()
    if scenario.beds == 1 and ledger.unserved > 1 + MOST_UNSERVED * ledger.carried:
        said = "; ".join(f"{count} x {body!r}" for body, count in ledger.refusals.most_common(3))
        ledger.violate(f"{ledger.unserved} requests were refused while a worker was well: {said}")
    return ledger


async def _warm_up(fleet: Fleet, scenario: Scenario, ledger: Ledger, seed: int) -> None:
    """So that what is made once is there before it is counted, and engines have compiled what they need."""
    await fleet.router.serving(fleet.session)
    load = Load(fleet.router, ledger, scenario.clients, 0.05, f"{seed}/warm", lambda: 0)
    await asyncio.sleep(1)
    await load.stop()


async def _round(
    fleet: Fleet, scenario: Scenario, ledger: Ledger, seconds: float, draw: random.Random, seed: str
) -> None:
    ward = Ward(scenario.workers, scenario.beds, draw)
    faults, schedule = Faults(fleet, ward, ledger, draw), Schedule(scenario.rates, draw)
    load = Load(fleet.router, ledger, scenario.clients, scenario.pause, seed, lambda: ward.well)
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < end:
            wait, kind = schedule.next()
            await asyncio.sleep(wait)
            group.create_task(_suffer(faults, kind))
    await load.stop()


async def _suffer(faults: Faults, kind: str) -> None:
    await faults.kinds[kind]()
