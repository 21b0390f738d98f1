"""The report of a run, as a table and as JSON (pure but for the terminal it is given)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from router.ab.figures import IN_TIME_LINES, LINES, values
from router.ab.machine import Cost
from router.ab.plan import Plan
from router.ab.statistics import Record, Summary, balance
from router.page.intervals import Interval, ratio_text
from router.page.results import BUSY, Comparison, Figure, Result, run_name

_BUSY = 0.85
"""The share of cores in use above which waiting for the CPU distorts the latencies of simulated engines."""
_LATE = 0.1
"""The lateness of the load generator, as a share of the mean TTFT, above which arrivals differ from the trace's."""
_STARVED = 0.05
"""Seconds of wall time; a load generator with enough CPU is never as late as that."""


class ModeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One mode, at one rate, with one seed."""

    mode: str
    rate: float
    seed: int
    workers: int
    """0: which one served a request is not known."""
    summary: Summary
    cost: Cost
    warnings: tuple[str, ...]
    ratios: dict[str, float | None]
    """The ratio of each metric to the baseline's of the same rate and seed; None where that is not a number."""
    requests: tuple[Record, ...]


class Report(msgspec.Struct, frozen=True):
    """A whole run. Times are simulated seconds (wall time × speedup), or real seconds for real engines."""

    command: tuple[str, ...]
    started: str
    versions: dict[str, str]
    settings: dict[str, object]
    trace: dict[str, float]
    baseline: str
    modes: tuple[ModeReport, ...]

    def encode(self) -> bytes:
        """The report as JSON, with null for missing numbers."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @property
    def real(self) -> bool:
        """Whether its seconds are real: workers that were given may still be simulated ones with a speed-up."""
        return bool(self.settings.get("workers")) and self.settings["speedup"] == 1


def warnings(
    records: Sequence[Record], asked: Sequence[int], summary: Summary, cost: Cost, refused: Sequence[str], plan: Plan
) -> tuple[str, ...]:
    """Reasons to distrust a mode's numbers, a sentence each. `asked`: by index, the tokens that each answer should
    have."""
    found = []
    if refused:
        found.append(
            f"modes are not comparable: {', '.join(refused)} would not empty the prefix cache, so later modes find it "
            "warm; vLLM does with VLLM_SERVER_DEV_MODE=1, once nothing runs there"
        )
    if summary.errors:
        first = next(one for one in records if one.error)
        found.append(f"{summary.errors} of {summary.requests} requests failed; the first: {first.error}")
    shorter = [one for one in records if not one.error and one.output_tokens < asked[one.index]]
    if shorter:
        found.append(
            f"modes are not comparable: {len(shorter)} of {summary.requests} answers were shorter than asked, the "
            f"first with {shorter[0].output_tokens} of {asked[shorter[0].index]} tokens; whoever answered did not heed "
            "min_tokens and ignore_eos"
        )
    # Not relative to TTFT alone: on a machine short of CPU TTFT is long too, which would hide the lateness.
    if summary.lag_p99 > min(_LATE * summary.ttft.mean, _STARVED * plan.speedup):
        found.append(
            f"the generator was late by {summary.lag_p99:.3f} s (p99), which may distort; {_remedy(cost, plan)}"
        )
    if cost.busy > _BUSY:
        found.append(
            f"not to be trusted: this machine was {cost.busy:.0%} busy, {cost.own_busy:.0%} by this run, which adds to "
            f"every time; {_remedy(cost, plan)}"
        )
    if summary.hit_ratio == 0 and not (plan.simulated or plan.no_reuse):
        found.append(
            "no worker reported cached tokens; vLLM does with --enable-prompt-tokens-details, SGLang with "
            "--enable-cache-report"
        )
    return tuple(found)


def _remedy(cost: Cost, plan: Plan) -> str:
    """What to do about a busy machine: other load comes first where it exceeds that of this run."""
    if cost.busy > 2 * cost.own_busy:
        return "run it on an idle machine"
    return "lower --speedup" if plan.speedup > 1 else "lower --rates"


def comparison(report: Report) -> Comparison:
    """The contents of the report, for the terminal and for the page."""
    lines = (*LINES, *(IN_TIME_LINES if report.settings.get("ttft_slo") is not None else ()))
    return Comparison(
        title=f"Routing compared: {', '.join(dict.fromkeys(mode.mode for mode in report.modes))}",
        about=_heading(report),
        results=[_result(mode) for mode in report.modes],
        baseline=report.baseline,
        figures=[line.figure for line in lines],
        rate_unit="× the trace's rate",
        times="Seconds are real." if report.real else f"Simulated seconds: wall time × {report.settings['speedup']:g}.",
        facts=_facts(report),
    )


def _result(mode: ModeReport) -> Result:
    return Result(
        policy=mode.mode,
        rate=mode.rate,
        seed=mode.seed,
        values=values(mode.summary),
        ttft=[one.ttft for one in mode.requests if one.ttft is not None],
        imbalance=balance(mode.requests, mode.workers),
        busy=(mode.cost.busy, mode.cost.own_busy),
        warnings=mode.warnings,
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    costs = [mode.cost for mode in report.modes]
    machine = (
        f"{costs[0].cores} cores, {min(cost.busy for cost in costs):.0%} to {max(cost.busy for cost in costs):.0%} busy"
    )
    told = {name: _told(value) for name, value in report.settings.items() if value not in (None, {})}
    settings = ", ".join(f"{name} {text}" for name, text in told.items() if text)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        ("command", shlex.join(report.command)),
        ("started", report.started),
        ("machine", f"{machine} during the runs"),
        ("versions", versions),
        ("settings", settings),
    ]


def _told(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def table(compared: Comparison, rate: float, *, real: bool, gaps: bool = False) -> Table:
    """A table with a column for each mode; a number is followed by its ratio to the baseline, in brackets. `real` says
    whether its seconds are real; with `gaps` it has rows also for figures that no mode has."""
    grid = Table(title=f"rate {rate:g}" if len(compared.rates) > 1 else None, title_justify="left")
    grid.add_column("seconds are real" if real else "simulated seconds")
    for policy in compared.policies:
        grid.add_column(policy, justify="right")
    for figure in compared.figures:
        if gaps or compared.has(figure.title):
            grid.add_row(figure.title, *(_cell(compared, figure, policy, rate) for policy in compared.policies))
    if any(result.busy for result in compared.results):
        grid.add_row(BUSY, *(compared.busy(policy, rate) for policy in compared.policies))
    return grid


def _heading(report: Report) -> str:
    trace, seconds = report.trace, report.trace["seconds"]
    lasted = f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
    return (
        f"{trace['requests']:.0f} requests in {lasted} s, {trace['input_tokens']:.0f} input and "
        f"{trace['output_tokens']:.0f} output tokens on average, {trace['reuse']:.0%} reusable by one endless cache"
        f"{_series(report)}"
    )


def _series(report: Report) -> str:
    """Says, where there are several rates or seeds, that the numbers of the heading are those of the first."""
    rates, seeds = ({getattr(mode, name): None for mode in report.modes} for name in ("rate", "seed"))
    if len(rates) == len(seeds) == 1:
        return ""
    listed = ", ".join(f"{rate:g}" for rate in rates), ", ".join(map(str, seeds))
    return " (at the first of rates {} and seeds {})".format(*listed)


def _legend(compared: Comparison) -> str:
    ratio = f" In brackets: the ratio to {compared.baseline}." if compared.relates else ""
    told = f"{compared.times}{ratio}"
    if len(compared.seeds) == 1:
        return told
    return f"{told} Means over {len(compared.seeds)} seeds; ± and – are 95 % confidence intervals between seeds."


def _cell(compared: Comparison, figure: Figure, policy: str, rate: float) -> str:
    value = compared.mean(figure.title, policy, rate)
    if math.isnan(value.mean):
        return "–"
    text = figure.form.format(value.mean) + (f" ±{figure.form.format(value.half)}" if value.half else "")
    if not figure.compared or policy == compared.baseline:
        return text
    return text + _ratio(compared.ratio(figure.title, policy, rate))


def _ratio(ratio: Interval) -> str:
    if math.isnan(ratio.mean):
        return ""
    text = f"{ratio_text(ratio.mean)}×"
    if ratio.low is None or ratio.high is None:
        return f" ({text})"
    return f" ({text} {ratio_text(ratio.low)}–{ratio_text(ratio.high)})"


def show(report: Report, console: Console) -> None:
    """Prints the tables and then every warning."""
    compared = comparison(report)
    console.print()
    console.print(compared.about, highlight=False, soft_wrap=True)
    for rate in compared.rates:
        console.print(table(compared, rate, real=report.real, gaps=True))
    console.print(_legend(compared), highlight=False, soft_wrap=True)
    for mode in report.modes:
        for warning in mode.warnings:
            console.print(f"[yellow]warning[/] {run_name(mode.mode, mode.rate, mode.seed, compared.single)}: ", end="")
            console.print(warning, markup=False, highlight=False, soft_wrap=True)
