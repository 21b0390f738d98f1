"""The same idea in virtual time: the router's queue, policies, books and index before engines that die, join, drain and
slow down, thousands of times in some seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator

from indexer.types import Tier
from router.ab.trace import BLOCK_TOKENS, Row
from router.simulation.arrival import Sample
from router.simulation.changes import Change, plan_changes
from router.simulation.fleet import EVENT_DELAY, FleetSettings, VirtualFleet
from router.simulation.run import find_policy
from tests.chaos.ledger import Ledger

NAME = "virtual"
WORKERS = 8
LEAST = 3
"""Workers that always live."""
RATE = 150.0
"""Requests a virtual second: some are in flight at each worker, and no queue grows."""
PROMPTS = 500
"""Beginnings that requests share."""
COPIES = 0.01
"""Of what a worker holds, the index may lack so much: a block that two requests computed at once is there twice, and is
reported as removed with the first copy that goes. (Publishers count copies; there is none here.)"""
SETTINGS = FleetSettings(workers=WORKERS, cache_tokens=65_536)
POLICY = "auto"


def run_virtual(requests: int, faults: int, seed: int, policy: str = POLICY) -> Ledger:
    ledger, draw = Ledger(NAME), random.Random(f"{seed}/{NAME}")
    rows = list(_rows(draw, requests))
    changes = list(_changes(draw, faults, rows[-1].timestamp / 1000))
    fleet = VirtualFleet(SETTINGS, find_policy(policy), seed)
    samples = fleet.run(rows, lambda fleet: plan_changes(fleet, changes))
    fleet.timeline.run(fleet.timeline.now() + 10 * EVENT_DELAY)  # the last events arrive
    for change in changes:
        ledger.faults[f"virtual {change.kind}"] += 1
    _check_fates(fleet, samples, requests, ledger)
    _check_rest(fleet, ledger)
    return ledger


def _rows(draw: random.Random, count: int) -> Iterator[Row]:
    at = 0.0
    for _ in range(count):
        at += draw.expovariate(RATE)
        yield Row(at * 1000, draw.randint(32, BLOCK_TOKENS), draw.randint(1, 24), (draw.randrange(PROMPTS),))


def _changes(draw: random.Random, count: int, seconds: float) -> Iterator[Change]:
    """For every worker that goes, another comes."""
    alive, drained, ever = list(range(WORKERS)), list[int](), WORKERS
    for at in sorted(draw.uniform(0, seconds) for _ in range(count)):
        kind = draw.choice(("kill", "slow", "slow", "join", "drain"))
        if kind == "slow":
            yield Change(at, "slow", draw.choice(alive), draw.choice((1.0, 2.0, 5.0)))
        elif kind == "join" and len(alive) < WORKERS:
            alive.append(ever)
            ever += 1
            yield Change(at, "join", 1)
        elif kind == "drain" and len(alive) > LEAST:
            drained.append(alive.pop(draw.randrange(len(alive))))
            yield Change(at, "drain", drained[-1])
        elif drained:
            yield Change(at, "kill", drained.pop(0))
        elif len(alive) > LEAST:
            yield Change(at, "kill", alive.pop(draw.randrange(len(alive))))


def _check_fates(fleet: VirtualFleet, samples: list[Sample], requests: int, ledger: Ledger) -> None:
    """One end for each request, and no failure but of a worker that has died."""
    if sorted(sample.number for sample in samples) != list(range(requests)):
        ledger.lost = requests - len({sample.number for sample in samples})
        ledger.violate(f"{len(samples)} ends for {requests} requests, {ledger.lost} without any")
    for sample in samples:
        if sample.fate == "answered":
            ledger.fates["answered"] += 1
        else:
            ledger.fates["refused" if sample.first is None else "broken"] += 1
            if sample.worker < 0 or fleet.ranks[sample.worker] in fleet.workers:
                ledger.violate(f"request {sample.number} has {sample.fate} at worker {sample.worker}, which lives")


def _check_rest(fleet: VirtualFleet, ledger: Ledger) -> None:
    """Nothing is booked, waits or is held for anybody; the index is what the living hold."""
    now, index = fleet.timeline.now(), fleet.index.dump()
    for rank in fleet.ranks:
        worker = fleet.workers.get(rank)
        held = set(worker.scheduler.cache.hashes) if worker else set()
        indexed = index.get((rank, Tier.GPU), set())
        if indexed - held or len(held - indexed) > COPIES * len(held):
            ledger.violate(f"the index of {rank} is not what it holds")
        if worker:
            worker.scheduler.cache.check_integrity()
            booked = fleet.scheduler.book.load(rank, now)
            if booked.requests or booked.prefill_tokens or booked.active_tokens:
                ledger.violate(f"{booked} is still booked for {rank}")
    if len(fleet.queue) or fleet.fetching or any(fleet._sent.values()):
        ledger.violate(f"{len(fleet.queue)} wait, {len(fleet.fetching)} fetch, or were sent to nobody")
