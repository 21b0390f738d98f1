"""Latency that a router adds: open loop at a fixed rate, through each router and straight to a worker, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .load import Outcome
from .measure import Effort, Sent, load
from .pairs import order
from .routers import Running

RATES = {1: 200, 16: 400, 256: 600}
"""Requests a second by connections: far below what the slowest router can do on two cores, so that queues are short."""


class Added(NamedTuple):
    """`each`: milliseconds beyond the direct way's in the same repeat, one for each repeat."""

    connections: int
    share: float
    router: str
    each: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    @property
    def least(self) -> float:
        return min(self.each)

    @property
    def greatest(self) -> float:
        return max(self.each)


def added_latency(routers: Sequence[Running], worker: str, effort: Effort, sent: Sent) -> list[Added]:
    direct = Running("direct", worker, 0, "")
    rows = []
    for connections, rate in [(16, RATES[16])] if effort.quick else RATES.items():
        flags = ["--connections", str(connections), "--rate", str(rate), "--seconds", str(effort.seconds)]
        runs = _runs([direct, *routers], flags, effort.repeats)
        for name, outcomes in runs.items():
            for outcome in outcomes:
                sent.add(f"{name} ({connections} connections)", outcome)
        for share in (0.5, 0.99):
            rows += [_added(connections, share, router.name, runs) for router in routers]
    return rows


def _runs(everybody: Sequence[Running], flags: Sequence[str], repeats: int) -> dict[str, list[Outcome]]:
    runs: dict[str, list[Outcome]] = {each.name: [] for each in everybody}
    for repeat in range(repeats):
        for position in order(len(everybody), repeat):
            each = everybody[position]
            runs[each.name].append(load(each, "short", *flags, "--seed", str(repeat)))
    return runs


def _added(connections: int, share: float, name: str, runs: dict[str, list[Outcome]]) -> Added:
    pairs = zip(runs[name], runs["direct"], strict=True)
    each = [(_at(share, routed) - _at(share, straight)) * 1e3 for routed, straight in pairs]
    return Added(connections, share, name, each)


def _at(share: float, outcome: Outcome) -> float:
    return outcome.p50 if share == 0.5 else outcome.p99
