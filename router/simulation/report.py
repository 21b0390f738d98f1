"""Tables for people, and JSON for machines (pure but for the terminal that it is given)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from router.page.intervals import mean_interval, ratio_interval
from router.simulation.figures import Figures
from router.simulation.suite import (
    GOAL_NO_REUSE,
    GOAL_SATURATED,
    GOAL_WORST,
    SATURATED,
    Line,
    e2e_mean,
    judge,
    tpot_mean,
    ttft_mean,
    ttft_p99,
)


class _Metric(NamedTuple):
    title: str
    of: Callable[[Figures], float]
    form: str = "{:.3f}"
    compared: bool = True
    """A ratio to the baseline says something."""


METRICS = (
    _Metric("TTFT s mean", lambda f: f.ttft.mean),
    _Metric("TTFT s p50", lambda f: f.ttft.p50),
    _Metric("TTFT s p90", lambda f: f.ttft.p90),
    _Metric("TTFT s p99", lambda f: f.ttft.p99),
    _Metric("TPOT ms mean", lambda f: f.tpot.mean * 1000, "{:.1f}"),
    _Metric("TPOT ms p50", lambda f: f.tpot.p50 * 1000, "{:.1f}"),
    _Metric("TPOT ms p99", lambda f: f.tpot.p99 * 1000, "{:.1f}"),
    _Metric("ITL ms p99", lambda f: f.itl.p99 * 1000, "{:.1f}"),
    _Metric("E2E s mean", lambda f: f.e2e.mean, "{:.2f}"),
    _Metric("E2E s p99", lambda f: f.e2e.p99, "{:.2f}"),
    _Metric("hit ratio %", lambda f: f.hit_ratio * 100, "{:.1f}"),
    _Metric("imbalance", lambda f: f.imbalance, "{:.2f}", compared=False),
    _Metric("refused", lambda f: f.refused, "{:,.0f}", compared=False),
    _Metric("failed", lambda f: f.failed, "{:,.0f}", compared=False),
    _Metric("goodput /s", lambda f: f.goodput, "{:.2f}"),
)
STORE_METRIC = _Metric("store hits %", lambda f: (f.store_ratio or 0.0) * 100, "{:.1f}")
"""Where there is a store."""

Results = Mapping[str, Sequence[Figures]]
"""By policy, one for each seed; of those that came last in a study that ended early, for the first seeds."""


def table(results: Results, baseline: str, title: str) -> Table:
    """One column per policy; behind a number, in brackets, its ratio to the baseline."""
    grid = Table(title=title, title_justify="left")
    grid.add_column("virtual seconds")
    for policy in results:
        grid.add_column(policy, justify="right")
    stored = any(one.store_ratio is not None for figures in results.values() for one in figures)
    for metric in (*METRICS, *([STORE_METRIC] if stored else [])):
        values = {policy: [metric.of(one) for one in figures] for policy, figures in results.items()}
        base = values.get(baseline, []) if metric.compared else []
        grid.add_row(metric.title, *(_cell(metric, its, [] if its is base else base) for its in values.values()))
    return grid


def _cell(metric: _Metric, values: Sequence[float], base: Sequence[float]) -> str:
    found = mean_interval(values)
    if math.isnan(found.mean):
        return "–"
    margin = "" if found.half is None else " ±" + metric.form.format(found.half)
    both = min(len(values), len(base))
    ratio = ratio_interval(values[:both], base[:both]).mean if both else math.nan
    return metric.form.format(found.mean) + margin + ("" if math.isnan(ratio) else f" ({ratio:.2f}×)")


def as_json(value: object) -> bytes:
    """Every tuple with names becomes an object; a number that is not there is null."""
    return msgspec.json.format(msgspec.json.encode(_named(value)), indent=1)


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _named(msgspec.structs.asdict(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _named(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _named(one) for key, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, list | tuple) else value


SUITE_HEAD = ("workload", "of knee", "rate", "auto s", "best baseline s", "auto/best", "p99", "TPOT", "E2E")


def suite_row(line: Line) -> tuple[str, ...]:
    """As in `SUITE_HEAD`. Each ratio is to the baseline that is best in that figure."""
    best = line.best(ttft_mean)
    return (
        line.workload,
        f"{line.load:g}" + ("" if line.saturated or line.load < SATURATED else "*"),
        f"{line.rate:.2f}",
        f"{line.mean('auto', ttft_mean):.3f}",
        f"{line.mean(best, ttft_mean):.3f} {best}",
        *(f"{line.ratio(of):.2f}" for of in (ttft_mean, ttft_p99, tpot_mean, e2e_mean)),
    )


def suite_table(lines: Sequence[Line]) -> Table:
    grid = Table()
    for number, head in enumerate(SUITE_HEAD):
        grid.add_column(head, justify="left" if number in {0, 4} else "right")
    for line in lines:
        grid.add_row(*suite_row(line))
    return grid


def verdicts(lines: Sequence[Line]) -> list[str]:
    """The judged figures in words, without those that none of the workloads tells."""
    verdict = judge(lines)
    figures = (
        ("saturated (0.9 and 1.1 of the knee), mean of auto/best", verdict.saturated, GOAL_SATURATED),
        ("all runs, worst auto/best", verdict.worst, GOAL_WORST),
        ("no-reuse, worst auto/least-loaded", verdict.no_reuse, GOAL_NO_REUSE),
    )
    return [f"{what}: {value:.3f}, goal {goal}" for what, value, goal in figures if not math.isnan(value)]


def page(lines: Sequence[Line], command: str) -> str:
    """The suite as Markdown."""
    rows = [SUITE_HEAD, ("---",) * len(SUITE_HEAD), *(suite_row(line) for line in lines)]
    body = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    judged = "\n".join(f"- {text}" for text in verdicts(lines))
    return rf"""# The suite's results

Written by `{command}`; [simulate.md](simulate.md) says what is compared. Mean TTFT in virtual seconds;
`best baseline` is the best of five in that very line. Behind it are `auto`'s mean TTFT, its p99, mean TPOT and mean
E2E (from arrival to the last token), each over that of whichever baseline is best in that figure. `*`: of twice the
nominal rate, in too short a run to saturate the fleet, so not among the saturated ones.

{judged}

{body}
"""
