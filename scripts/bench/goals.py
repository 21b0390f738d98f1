"""Each goal beside what was measured: met or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .index import IndexRow
from .latency import Added
from .pairs import Ratio
from .proxies import SILENT, CpuRow
from .workloads import WORKLOADS

DEFAULT_DYNAMO = "dynamo kv (default tokenizer)"
_CPU_GOALS = {
    "vllm-router round_robin": (0.8, ("short", "long", "stream")),
    "vllm-router cache_aware": (1.0, ("short", "stream")),
    "sglang-router cache_aware": (1.0, ("short", "stream")),
    DEFAULT_DYNAMO: (0.1, ("long", "chat")),
}


class Goal(NamedTuple):
    goal: str
    ours: str
    peer: str
    ratio: str
    verdict: str


def _verdict(met: bool, each: Iterable[bool] = ()) -> str:
    """`met` is said of the medians, `each` of the repeats: where they disagree, another run may say otherwise."""
    agreed = all(one == met for one in each)
    if met:
        return "met" if agreed else "met, but not in every repeat"
    return "**not met**" if agreed else "**not met**, but in some repeats"


def _at_most(ratio: Ratio, limit: float) -> str:
    return _verdict(ratio.median <= limit, (ratio.least <= limit, ratio.greatest <= limit))


def cpu_goals(rows: list[CpuRow]) -> Iterator[Goal]:
    for row in rows:
        limit, workloads = _CPU_GOALS.get(row.peer_name, (0.0, ()))
        told_less = row.ours_name.endswith(SILENT) and row.peer_name == DEFAULT_DYNAMO
        if row.workload in workloads and not told_less:
            yield Goal(
                f"CPU per request, {WORKLOADS[row.workload].title}, {row.ours_name}: ≤ {limit:g} × {row.peer_name}",
                f"{row.ours:,.0f} µs",
                f"{row.peer:,.0f} µs",
                str(row.ratio),
                _at_most(row.ratio, limit),
            )


def latency_goals(rows: list[Added]) -> Iterator[Goal]:
    """Each of our modes against the best peer, whatever its policy."""
    for ours in (row for row in rows if row.router.startswith("ours")):
        same = [row for row in rows if (row.connections, row.share) == (ours.connections, ours.share)]
        peers = [row for row in same if not row.router.startswith("ours")]
        if not peers:
            continue
        best = min(peers, key=lambda row: row.median)
        yield Goal(
            f"added latency p{ours.share * 100:g}, {ours.connections} connections, {ours.router}: ≤ the best peer's",
            _milliseconds(ours),
            f"{_milliseconds(best)}, {best.router}",
            "",
            _latency_verdict(ours, best),
        )


def _latency_verdict(ours: Added, best: Added) -> str:
    """Where a router seems to add less than nothing, other work on the machine made the difference."""
    if min(ours.least, best.least) <= 0:
        return "too noisy to tell"
    pairs = zip(ours.each, best.each, strict=True)
    return _verdict(ours.median <= best.median, (mine <= theirs for mine, theirs in pairs))


def _milliseconds(row: Added) -> str:
    return f"{row.median:.2f} ms ({row.least:.2f}–{row.greatest:.2f})"


def index_goals(rows: list[IndexRow]) -> Iterator[Goal]:
    small, large = (_find(rows, f"find_matches, {workers} workers", "i/n each") for workers in (64, 1024))
    if small:
        yield _index_goal(small, "≤ 0.2 × RadixTree", _at_most(small.ratio, 0.2))
    if small and large:
        growth = large.ours / small.ours
        what = "find_matches at 1,024 workers: ≤ 3 × its own time at 64"
        yield Goal(what, f"{large.ours:.1f} µs", f"{small.ours:.1f} µs at 64", f"{growth:.2f}", _verdict(growth <= 3))
    for row in rows:
        if row.what.startswith("memory"):
            yield _index_goal(row, "≤ RadixTree", _at_most(row.ratio, 1))
        elif row.unit.endswith("reading left out"):
            least, greatest = (bound >= 1 for bound in (row.ratio.least, row.ratio.greatest))
            yield _index_goal(row, "≥ RadixTree", _verdict(row.ratio.median >= 1, (least, greatest)))


def _find(rows: list[IndexRow], what: str, unit: str) -> IndexRow | None:
    return next((row for row in rows if row.what == what and row.unit.endswith(unit)), None)


def _index_goal(row: IndexRow, limit: str, verdict: str) -> Goal:
    return Goal(f"{row.what}, {row.unit}: {limit}", f"{row.ours:,.4g}", f"{row.peer:,.4g}", str(row.ratio), verdict)


def _delay_verdict(delay: float, still: float) -> str:
    """Where other work alone delays tokens by more than the goal, the rest is chance."""
    return _verdict(delay - still <= 2) if still <= 2 else "too noisy to tell"


def decision_goals(found: dict[str, float]) -> Iterator[Goal]:
    if not found:
        return
    entries = f"{found['entries'] / 1e6:.1f} M entries"
    p99 = found["decision p99"]
    yield Goal(f"routing decision p99, {entries}: ≤ 0.3 ms", f"{p99:.3f} ms", "", "", _verdict(p99 <= 0.3))
    delay, still = found["token delay p99.9"], found["token delay p99.9, no events"]
    what = f"token delay p99.9 by event ingest, {entries}: ≤ 2 ms"
    yield Goal(what, f"{delay:.2f} ms", f"{still:.2f} ms without events", "", _delay_verdict(delay, still))
