"""One soak, from the start of its processes to the last look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scripts.bench.cpu import tree_seconds
from tests.chaos.fleet import GONE
from tests.soak.churn import Churn
from tests.soak.fleet import Fleet
from tests.soak.load import Load
from tests.soak.samples import Sample
from tests.soak.verdict import MOST_LEFT, Finding, Limits, judge, warm_up

EVERY = 5.0
SHARE = 0.7
"""Of the machine's processors that the load is to take, itself included."""
TRIAL_RATE, TRIAL = 15.0, 12.0
"""Requests a second, and seconds, of the run that finds out what a request costs."""
REST = 30.0
"""Seconds after the load in which all must be given back."""

_BOOKED = (
    "router_requests_in_flight",
    "router_load_requests",
    "router_load_prefill_tokens",
    "router_load_active_tokens",
)

Say = Callable[[str], None]


class Settings(NamedTuple):
    minutes: float
    rate: float | None
    engines: int
    churn: float
    seed: int
    limits: Limits


class Outcome(NamedTuple):
    settings: Settings
    rate: float
    samples: list[Sample]
    fates: dict[str, int]
    deaths: int
    joins: int
    findings: list[Finding]
    unexplained: int
    faults: list[str]
    """The first of those."""

    @property
    def good(self) -> bool:
        return all(finding.good for finding in self.findings)


async def soak(settings: Settings, folder: Path, say: Say) -> Outcome:
    """Raises TooMuch."""
    draw = random.Random(settings.seed)
    async with Fleet(folder, settings.engines) as fleet:
        rate = settings.rate or await _rate(fleet, draw, say)
        churn = Churn(fleet, settings.churn, draw)
        load = Load(fleet.router, rate, draw, churn.explains)
        say(f"{rate:.0f} requests a second for {settings.minutes:g} min; a worker dies every {settings.churn:g} s")
        await fleet.probe.start()
        before = fleet.router.actor.descriptors
        load.start()
        churn.start()
        try:
            samples = await _sample(fleet, load, settings.minutes * 60, say)
        finally:
            await churn.stop()
            await load.stop()
        evicted = round((await fleet.router.metrics(fleet.session))["router_index_evicted_blocks_total"])
        findings = await _findings(fleet, samples, load, settings, before)
        done = [*findings, Finding("blocks evicted from the index", f"{evicted:,}", "some", evicted > 0)]
        deaths, fates = len(churn.deaths), dict(load.fates)
        return Outcome(settings, rate, samples, fates, deaths, churn.joins, done, load.unexplained, load.faults)


async def _rate(fleet: Fleet, draw: random.Random, say: Say) -> float:
    """Requests a second that take SHARE of the processors, by what a few cost. The first ones warm everything up."""
    load = Load(fleet.router, TRIAL_RATE, draw, lambda began, ended: False)
    before, began = tree_seconds(os.getpid()), time.monotonic()
    load.start()
    await asyncio.sleep(TRIAL)
    await load.stop()
    spent, seconds = tree_seconds(os.getpid()) - before, time.monotonic() - began
    cost = spent / sum(load.fates.values())
    processors = len(os.sched_getaffinity(0))
    busy = f"{spent / seconds / processors:.0%} of {processors} processors at {TRIAL_RATE:g} a second"
    say(f"A request takes {cost * 1e3:.1f} ms of processor time: {busy}")
    return SHARE * processors / cost


async def _sample(fleet: Fleet, load: Load, seconds: float, say: Say) -> list[Sample]:
    samples: list[Sample] = []
    began, before = time.monotonic(), 0
    while time.monotonic() - began < seconds and load.running:
        told = json.loads(await fleet.probe.first_line())
        answered = sum(load.fates.values())
        actor, at = fleet.router.actor, time.monotonic() - began
        p50, p99 = told.get("p50"), told.get("p99")
        samples.append(Sample(at, actor.megabytes, actor.descriptors, answered - before, load.in_flight, p50, p99))
        before = answered
        if len(samples) % 12 == 0:
            say(_line(samples[-1]))
    return samples


def _line(sample: Sample) -> str:
    return (
        f"{sample.at:6.0f} s  {sample.rss:7.1f} MB  {sample.descriptors:4} files  {sample.in_flight:4} in flight  "
        f"overhead p50 {sample.p50 or 0:.2f} ms, p99 {sample.p99 or 0:.2f} ms"
    )


async def _findings(fleet: Fleet, samples: list[Sample], load: Load, settings: Settings, files: int) -> list[Finding]:
    """`files`: how many the router had open before the load."""
    since = warm_up(settings.minutes * 60)
    left, open_files = await _left(fleet), await _open_files(fleet, files + MOST_LEFT)
    status = await _drained(fleet)
    tracebacks = fleet.router.actor.log.count("Traceback")
    return [
        *judge([each for each in samples if each.at >= since], settings.limits),
        Finding("requests that failed, and no death explains it", str(load.unexplained), "0", load.unexplained == 0),
        Finding("booked, queued or in flight at the end", left or "nothing", "nothing", not left),
        Finding(
            "open files before, after", f"{files}, {open_files}", f"≤ {MOST_LEFT} more", open_files <= files + MOST_LEFT
        ),
        Finding("exit status after SIGTERM", str(status), "0", status == 0),
        Finding("tracebacks in the log", str(tracebacks), "0", not tracebacks),
    ]


async def _left(fleet: Fleet) -> str:
    """What the router still has to do when all is over; "" for nothing."""
    end, left = time.monotonic() + REST, "the router does not answer"
    while left and time.monotonic() < end:
        with contextlib.suppress(*GONE):
            metrics, told = await fleet.router.metrics(fleet.session), await fleet.router.tell()
            left = ", ".join(f"{name} {metrics[name]:g}" for name in _BOOKED if metrics[name])
            left += f"{told['queue']} in the queue" if told["queue"] else ""
        await asyncio.sleep(0.5)
    return left


async def _open_files(fleet: Fleet, most: int) -> int:
    """As soon as they are no more than that: connections to workers are kept for some seconds."""
    end = time.monotonic() + REST
    while (count := fleet.router.actor.descriptors) > most and time.monotonic() < end:  # noqa: ASYNC110 -- as above
        await asyncio.sleep(0.5)
    return count


async def _drained(fleet: Fleet) -> int | str:
    try:
        return await fleet.router.drain()
    except TimeoutError:
        return "it does not end"
