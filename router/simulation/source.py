"""The source of a run's requests, and how they are altered before they are sent."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from router.ab.arrivals import Arrivals, prepare
from router.ab.errors import RunError
from router.ab.trace import Row
from router.ab.trace_file import load
from router.simulation.workloads import WORKLOADS, Workload


class Requests(NamedTuple):
    """Requests of a workload or of a trace: one of the two is given. `duration` is in the trace's own seconds."""

    workload: str | None = None
    trace: str | None = None
    duration: float | None = None
    limit: int | None = None
    arrivals: Arrivals = "trace"
    reuse: bool = True

    @property
    def kind(self) -> Workload | None:
        return WORKLOADS[self.workload] if self.workload else None

    def rows(self, seed: int, rate: float) -> list[Row]:
        """The requests in order of arrival, at `rate` times the trace's rate. Raises RunError if there are none."""
        rows = _prepared(self, seed)
        if not rows:
            raise RunError("no request is left; give a longer --duration or a larger --limit")
        return [replace(row, timestamp=row.timestamp / rate) for row in rows]


@lru_cache(maxsize=4)
def _prepared(requests: Requests, seed: int) -> list[Row]:
    return prepare(
        _all_rows(requests, seed),
        seed,
        duration=requests.duration,
        limit=requests.limit,
        arrivals=requests.arrivals,
        reuse=requests.reuse,
    )


def _all_rows(requests: Requests, seed: int) -> list[Row]:
    workload = requests.kind
    if workload:
        return workload.rows(seed, requests.duration or workload.seconds)
    return load(requests.trace or "synthetic", seed)
