"""What a run found: a table for people and JSON for machines (pure but for the terminal it is given)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from router.ab.machine import Cost
from router.ab.plan import Plan
from router.ab.statistics import Record, Spread, Summary

_BUSY = 0.85
"""Share of the machine's cores above which processes wait for each other more than for the simulated engines."""
_LATE = 0.1
"""Share of the mean TTFT by which the generator may be late before arrivals are no longer the trace's."""
_STARVED = 0.05
"""Seconds of wall time by which a generator that gets the CPU it needs is never late."""


class ModeReport(msgspec.Struct, frozen=True):
    """One mode of a run."""

    mode: str
    summary: Summary
    cost: Cost
    warnings: tuple[str, ...]
    ratios: dict[str, float | None]
    """Each metric divided by the baseline's; None where that is not a number."""
    requests: tuple[Record, ...]


class Report(msgspec.Struct, frozen=True):
    """A whole run. Times are simulated seconds: wall time × speedup."""

    command: tuple[str, ...]
    started: str
    versions: dict[str, str]
    settings: dict[str, object]
    trace: dict[str, float]
    baseline: str
    modes: tuple[ModeReport, ...]

    def encode(self) -> bytes:
        """As JSON; a number that is not there is null."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class _Line(msgspec.Struct, frozen=True):
    """A row of the table. `compared`: a ratio to the baseline says something."""

    title: str
    value: Callable[[Summary], float]
    form: str = "{:.3f}"
    compared: bool = True


def _spread(title: str, of: Callable[[Summary], Spread], cuts: Sequence[str], form: str, factor: float) -> list[_Line]:
    def line(cut: str) -> _Line:
        return _Line(f"{title} {cut}", lambda summary: getattr(of(summary), cut) * factor, form)

    return [line(cut) for cut in cuts]


LINES: tuple[_Line, ...] = (
    _Line("requests", lambda s: s.requests, "{:,.0f}", compared=False),
    _Line("errors", lambda s: s.errors, "{:,.0f}", compared=False),
    *_spread("TTFT s", lambda s: s.ttft, ("mean", "p50", "p90", "p99"), "{:.3f}", 1),
    *_spread("TPOT ms", lambda s: s.tpot, ("mean", "p50", "p99"), "{:.1f}", 1000),
    *_spread("E2E s", lambda s: s.e2e, ("mean", "p50", "p99"), "{:.2f}", 1),
    _Line("cached prompt tokens %", lambda s: s.hit_ratio * 100, "{:.1f}"),
    _Line("imbalance, uncached tokens", lambda s: s.imbalance_prefill, "{:.2f}", compared=False),
    _Line("imbalance, requests", lambda s: s.imbalance_requests, "{:.2f}", compared=False),
    _Line("output tokens / s", lambda s: s.output_tokens_per_second, "{:,.0f}"),
    _Line("requests / s", lambda s: s.requests_per_second, "{:.2f}"),
    _Line("generator lag p99 s", lambda s: s.lag_p99, "{:.4f}", compared=False),
)


def ratios(summary: Summary, baseline: Summary) -> dict[str, float | None]:
    """Every compared line's value over the baseline's."""
    pairs = {line.title: (line.value(summary), line.value(baseline)) for line in LINES if line.compared}
    return {title: _ratio(value, base) for title, (value, base) in pairs.items()}


def _ratio(value: float, base: float) -> float | None:
    return value / base if base and not math.isnan(value) and not math.isnan(base) else None


def warnings(
    records: Sequence[Record], summary: Summary, cost: Cost, refused: Sequence[str], plan: Plan
) -> tuple[str, ...]:
    """What makes a mode's numbers less than they seem, a sentence each."""
    found = []
    if refused:
        found.append(
            f"modes are not comparable: {', '.join(refused)} would not empty the prefix cache, so later modes find it "
            "warm; vLLM does with VLLM_SERVER_DEV_MODE=1"
        )
    if summary.errors:
        first = next(one for one in records if one.error)
        found.append(f"{summary.errors} of {summary.requests} requests failed; the first: {first.error}")
    # Not by TTFT alone: a starved machine lengthens TTFT as well, and would excuse its own lateness.
    if summary.lag_p99 > min(_LATE * summary.ttft.mean, _STARVED * plan.speedup):
        found.append(f"the generator was late by {summary.lag_p99:.3f} s (p99), which may distort; {_remedy(cost)}")
    if cost.busy > _BUSY:
        found.append(
            f"not to be trusted: this machine was {cost.busy:.0%} busy, {cost.own_busy:.0%} by this run, which adds to "
            f"every time; {_remedy(cost)}"
        )
    if not plan.simulated and not summary.hit_ratio and summary.errors < summary.requests:
        found.append(
            "no worker reported cached tokens; vLLM does with --enable-prompt-tokens-details, SGLang with "
            "--enable-cache-report"
        )
    return tuple(found)


def _remedy(cost: Cost) -> str:
    """Others on the machine are the first thing to change where they took more than this run."""
    crowded = cost.busy > 2 * cost.own_busy
    return "run it on an idle machine" if crowded else "lower --speedup"


def table(report: Report) -> Table:
    """One column per mode; behind a number, in brackets, its ratio to the baseline."""
    grid = Table()
    grid.add_column("simulated seconds")
    for mode in report.modes:
        grid.add_column(mode.mode, justify="right")
    for line in LINES:
        grid.add_row(line.title, *(_cell(line, mode, report.baseline) for mode in report.modes))
    grid.add_row("machine busy, of it this run %", *(_busy(mode.cost) for mode in report.modes))
    return grid


def _heading(report: Report) -> str:
    trace = report.trace
    return (
        f"{trace['requests']:.0f} requests in {trace['seconds']:.0f} s, {trace['input_tokens']:.0f} input and "
        f"{trace['output_tokens']:.0f} output tokens on average, {trace['reuse']:.0%} reusable by one endless cache"
    )


def _legend(report: Report) -> str:
    speedup = report.settings["speedup"]
    return f"Simulated seconds: wall time × {speedup:g}. In brackets: the ratio to {report.baseline}."


def _cell(line: _Line, mode: ModeReport, baseline: str) -> str:
    value = line.value(mode.summary)
    if math.isnan(value):
        return "–"
    ratio = mode.ratios.get(line.title) if mode.mode != baseline else None
    return line.form.format(value) + (f" ({ratio:.2f}×)" if ratio is not None else "")


def _busy(cost: Cost) -> str:
    return f"{cost.busy:.0%}, {cost.own_busy:.0%}".replace("%", "")


def show(report: Report, console: Console) -> None:
    """Prints the table and then every warning."""
    console.print()
    console.print(_heading(report), highlight=False, soft_wrap=True)
    console.print(table(report))
    console.print(_legend(report), highlight=False, soft_wrap=True)
    for mode in report.modes:
        for warning in mode.warnings:
            console.print(f"[yellow]warning[/] {mode.mode}: ", end="")
            console.print(warning, markup=False, highlight=False, soft_wrap=True)
