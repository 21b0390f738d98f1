"""Runs the load generator against routers, in turn, and keeps what each run gave."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .cpu import tree_seconds
from .load import Outcome
from .pairs import order
from .places import ROOT
from .routers import Running
from .workloads import WORKLOADS

CONNECTIONS = {"stream": 64}
"""Of the closed loop, where not 32: streams leave a router idle most of the time."""


class Effort(NamedTuple):
    """How much of each measurement."""

    repeats: int
    seconds: float
    quick: bool = False


class Sent:
    """The requests of all measurements, and those that failed, by router and load."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed: Counter[str] = Counter()

    def add(self, who: str, outcome: Outcome) -> None:
        self.requests += outcome.requests
        self.failed[who] += outcome.errors

    def __str__(self) -> str:
        failed = ", ".join(f"{count:,} of {who}" for who, count in self.failed.items() if count)
        return f"{failed or 'none'}; there were {self.requests:,}"


def load(router: Running, workload: str, *flags: str) -> Outcome:
    """Raises RuntimeError when the generator fails or most requests do."""
    command = [sys.executable, "-m", "scripts.bench.load", "--url", router.url, "--workload", workload, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{router.name}, {workload}: {done.stderr.strip()[-400:]}")
    try:
        outcome = Outcome(**json.loads(done.stdout))
    except ValueError:
        raise RuntimeError(f"{router.name}, {workload}: the generator said {done.stdout[-200:]!r}") from None
    if outcome.errors * 100 > outcome.requests or not outcome.requests:
        raise RuntimeError(f"{router.name}, {workload}: {outcome.errors} of {outcome.requests} requests failed")
    return outcome


def cpu_per_request(routers: Sequence[Running], workload: str, effort: Effort, sent: Sent) -> dict[str, list[float]]:
    """Microseconds, by router, one for each repeat."""
    found: dict[str, list[float]] = {router.name: [] for router in routers}
    flags = [
        "--connections",
        str(CONNECTIONS.get(workload, 32)),
        "--seconds",
        str(effort.seconds),
        *(["--warm-up", "0.3"] if effort.quick else []),
    ]
    for repeat in range(effort.repeats):
        for position in order(len(routers), repeat):
            router = routers[position]
            outcome = load(router, workload, *flags, "--pid", str(router.pid), "--seed", str(repeat))
            sent.add(f"{router.name} ({WORKLOADS[workload].title})", outcome)
            found[router.name].append(outcome.cpu / outcome.requests * 1e6)
    return found


def idle_cpu(router: Running, seconds: float = 5.0) -> float:
    """Milliseconds of CPU a second that it takes to do nothing: health checks, polling, timers.

    Raises RuntimeError when it has ended.
    """
    try:
        before = tree_seconds(router.pid)
        time.sleep(seconds)
        return (tree_seconds(router.pid) - before) / seconds * 1e3
    except ProcessLookupError:
        raise RuntimeError(f"{router.name} ended before it was asked anything") from None
