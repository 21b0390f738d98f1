"""Streams that are open for long and say little: how many a router holds, and what each costs in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts.bench.cpu import descendants
from scripts.bench.places import ROOT
from scripts.bench.processes import CannotStart, Child
from scripts.bench.routers import Running
from tests.chaos.actors import megabytes

OPENED_PER_SECOND = 50
"""At least; by then the first streams must not have ended."""


class Plan(NamedTuple):
    streams: int
    interval: float
    """Seconds between two tokens of a stream."""

    @property
    def tokens(self) -> int:
        """Of each stream, so that the first is still open when the last has begun."""
        return 2 + round(self.streams / OPENED_PER_SECOND / self.interval)


class Streams(NamedTuple):
    """`held`: open at the same time. `kilobytes`: of the router's memory, for each that was held."""

    asked: int
    held: int
    whole: int
    kilobytes: float

    @property
    def good(self) -> bool:
        return self.asked == self.held == self.whole


@contextmanager
def slow_worker(plan: Plan) -> Iterator[str]:
    flags = ["--tokens", str(plan.tokens), "--interval", str(plan.interval)]
    child = Child("slow-worker", [sys.executable, "-m", "tests.load.slow_worker", *flags])
    try:
        child.wait_until(lambda: "\n" in child.output())
        yield json.loads(child.output())["workers"][0]
    finally:
        child.stop()


def hold(router: Running, plan: Plan) -> Streams:
    """Raises CannotStart."""
    patience = str(plan.tokens * plan.interval + 30)
    flags = ["--url", router.url, "--count", str(plan.streams), "--patience", patience]
    before = _megabytes(router.pid)
    command = [sys.executable, "-m", "tests.load.streams", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        opened = child.stdout.readline()
        after = _megabytes(router.pid)
        told = child.stdout.read()
    if opened != "open\n" or not told:
        raise CannotStart(f"{router.name}: the streams were not opened")
    found = json.loads(told)
    return Streams(**found, kilobytes=(after - before) * 1024 / max(1, found["held"]))


def _megabytes(pid: int) -> float:
    return sum(megabytes(each) for each in descendants(pid) if Path(f"/proc/{each}").exists())
