"""What a run found: a table, the goal's verdict, and JSON (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from router.ab.machine import Cost
from router.ab.plan import Plan
from router.ab.report import warnings
from router.ab.statistics import Record, Summary, summarise
from scripts.bench.selection.arms import Measured
from scripts.bench.selection.options import DYNAMO, OURS


class ArmReport(msgspec.Struct, frozen=True):
    """`summary` is of the requests of all repeats together; `expected`: what the service took for cached, 0–1."""

    arm: str
    summary: Summary
    expected: float | None
    repeats: tuple[Summary, ...]
    costs: tuple[Cost, ...]
    warnings: tuple[str, ...]
    requests: tuple[tuple[Record, ...], ...]


class Verdict(msgspec.Struct, frozen=True):
    """`ratio` is ours over Dynamo's, `repeats` the same within each repeat."""

    what: str
    ratio: float
    limit: float
    repeats: tuple[float, ...]
    verdict: str


class Report(msgspec.Struct, frozen=True):
    command: tuple[str, ...]
    started: str
    peer: str
    settings: dict[str, object]
    trace: dict[str, float]
    arms: tuple[ArmReport, ...]
    verdicts: tuple[Verdict, ...]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


_GOALS: tuple[tuple[str, Callable[[Summary], float], float], ...] = (
    ("mean TTFT", lambda summary: summary.ttft.mean, 0.6),
    ("p99 TTFT", lambda summary: summary.ttft.p99, 1.0),
    ("median TPOT", lambda summary: summary.tpot.p50, 1.0),
)
_COLUMNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests", lambda summary: f"{summary.requests:,}"),
    ("errors", lambda summary: f"{summary.errors:,}"),
    ("TTFT mean s", lambda summary: f"{summary.ttft.mean:.3f}"),
    ("p50", lambda summary: f"{summary.ttft.p50:.3f}"),
    ("p99", lambda summary: f"{summary.ttft.p99:.3f}"),
    ("TPOT p50 ms", lambda summary: f"{summary.tpot.p50 * 1000:.2f}"),
    ("cached %", lambda summary: f"{summary.hit_ratio * 100:.1f}"),
)


def arm_report(arm: str, repeats: Sequence[Measured], asked: Sequence[int], plan: Plan) -> ArmReport:
    """`repeats`: what was measured of one arm, in order. `asked`: as for `warnings`."""
    each = [summarise(one.records, plan.sim_workers) for one in repeats]
    found = [
        warnings(one.records, asked, summary, one.cost, (), plan) for one, summary in zip(repeats, each, strict=True)
    ]
    return ArmReport(
        arm=arm,
        summary=_together(each, summarise([record for one in repeats for record in one.records], plan.sim_workers)),
        expected=_expected(repeats),
        repeats=tuple(each),
        costs=tuple(one.cost for one in repeats),
        warnings=tuple(text for texts in found for text in texts),
        requests=tuple(one.records for one in repeats),
    )


def _together(repeats: Sequence[Summary], whole: Summary) -> Summary:
    """`whole` would have all repeats begin at once; they follow each other."""
    seconds = sum(one.duration for one in repeats)

    def rate(of: Callable[[Summary], float]) -> float:
        return sum(of(one) * one.duration for one in repeats) / seconds if seconds else 0.0

    return msgspec.structs.replace(
        whole,
        duration=seconds,
        output_tokens_per_second=rate(lambda one: one.output_tokens_per_second),
        requests_per_second=rate(lambda one: one.requests_per_second),
    )


def _expected(repeats: Sequence[Measured]) -> float | None:
    tallies = [one.tally for one in repeats if one.tally is not None]
    prompt = sum(tally.prompt_tokens for tally in tallies)
    return sum(tally.cached_tokens for tally in tallies) / prompt if prompt else None


def judge(arms: Sequence[ArmReport]) -> tuple[Verdict, ...]:
    """Nothing unless both sides are there."""
    by_name = {one.arm: one for one in arms}
    ours, dynamo = by_name.get(OURS), by_name.get(DYNAMO)
    if ours is None or dynamo is None:
        return ()
    return tuple(_verdict(what, of, limit, ours, dynamo) for what, of, limit in _GOALS)


def _verdict(what: str, of: Callable[[Summary], float], limit: float, ours: ArmReport, dynamo: ArmReport) -> Verdict:
    ratio = _ratio(of(ours.summary), of(dynamo.summary))
    each = tuple(_ratio(of(one), of(other)) for one, other in zip(ours.repeats, dynamo.repeats, strict=True))
    failed = ours.summary.errors + dynamo.summary.errors
    verdict = f"void, {failed} requests failed" if failed else "met" if ratio <= limit else "not met"
    return Verdict(what, ratio, limit, each, verdict)


def _ratio(value: float, base: float) -> float:
    return value / base if base else float("nan")


def table(arms: Sequence[ArmReport]) -> Table:
    """A row per arm; the machine's busiest repeat is the one shown."""
    grid = Table()
    grid.add_column("arm")
    for title, _ in _COLUMNS:
        grid.add_column(title, justify="right")
    grid.add_column("machine busy, by this run %", justify="right")
    for one in arms:
        worst = max(one.costs, key=lambda cost: cost.busy)
        busy = f"{worst.busy * 100:.0f}, {worst.own_busy * 100:.0f}"
        grid.add_row(one.arm, *(form(one.summary) for _, form in _COLUMNS), busy)
    return grid


def sentences(report: Report) -> list[str]:
    """What stands below the table."""
    lines = [
        f"{report.peer} took {one.expected:.1%} of its prompt tokens for cached" for one in report.arms if one.expected
    ]
    lines += [_line(verdict) for verdict in report.verdicts]
    return lines + [f"warning, {one.arm}: {text}" for one in report.arms for text in one.warnings]


def _line(verdict: Verdict) -> str:
    each = ", ".join(f"{ratio:.3f}" for ratio in verdict.repeats)
    within = f"; by repeat {each}" if len(verdict.repeats) > 1 else ""
    return (
        f"{verdict.what}: ours is {verdict.ratio:.3f} × dynamo's, goal ≤ {verdict.limit:g}: {verdict.verdict}{within}"
    )
