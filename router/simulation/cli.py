"""`python -m router simulate`: reads what to simulate, runs it in virtual time, reports."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeAlias

import msgspec
from rich.console import Console

from router.ab.errors import RunError
from router.ab.flags import check_writable, tell_written, write_all
from router.ab.output import Output
from router.page.results import has_ratios
from router.simulation.crediting import Line as CreditLine
from router.simulation.crediting import credit_table, credit_verdicts, run_credit
from router.simulation.figures import Figures
from router.simulation.knee import FURTHEST, GROWTH, LIGHT, Knee
from router.simulation.plan import BASELINES, Plan, read_plan
from router.simulation.report import as_json, page, suite_table, table, verdicts
from router.simulation.run import Runner, runner
from router.simulation.suite import Case, Line, cases, find_knees, judge, run_suite

NAME = "kv-router simulate"
_NO_KNEE = f"There is no knee up to rate {FURTHEST:g}: mean TTFT stays within {GROWTH:g} times that at rate {LIGHT:g}"
_REPORTED = "; what was complete is reported"
_CROWDED = f"requests wait for each other at rate {LIGHT:g} already, by which a knee is told; give more --workers"


Found: TypeAlias = dict[str, Any]
"""The contents of the JSON report, besides how it came about. Lists are filled as results come."""


class Result(msgspec.Struct, frozen=True):
    """A run, as shown in the report."""

    workload: str | None
    policy: str
    rate: float
    seed: int
    figures: Figures


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for what cannot be run or written, 130 when interrupted, by SIGTERM too. What was
    complete by then is reported."""
    try:
        plan = read_plan(argv)
        check_writable("--out", plan.out)
        check_writable("--page", plan.page)
    except RunError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return 2
    width = None if sys.stdout.isatty() else 140
    console = Output(bool(plan.out or plan.page), width=width, highlight=False, soft_wrap=True)
    found: Found = {}
    status = _run(plan, console, found)
    if status and not any(found.values()):
        return status
    files = _files(plan, found, argv, complete=status == 0)
    written = write_all(NAME, files)
    tell_written(written, console)
    console.check()
    return status if len(written) == len(files) else 2


def _run(plan: Plan, console: Console, found: Found) -> int:
    """Fills `found`. Returns the exit status."""
    try:
        with _interrupted_by_sigterm(), runner(plan.jobs) as runs:
            _study(plan, runs, console, found)
    except RunError as error:
        said, status = f"{error}", 2
    except KeyboardInterrupt:
        said, status = "interrupted", 130
    else:
        return 0
    sys.stderr.write(f"{NAME}: {said}{_REPORTED if any(found.values()) else ''}\n")
    return status


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C. If it ended at once, Python would warn of what its processes shared."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _files(plan: Plan, found: Found, argv: Sequence[str], complete: bool) -> dict[str, bytes]:
    """What is to be written, by path. A page that shows less than it says would be worse than the last one."""
    files: dict[str, bytes] = {}
    if plan.page and complete:
        command = shlex.join(["python", "-m", "router", "simulate", *argv])
        files[plan.page] = page(found["lines"], command).encode()
    if plan.out:
        head = {"command": [*NAME.split(), *argv], "settings": plan, "complete": complete}
        files[plan.out] = as_json({**head, **found})
    return files


def _study(plan: Plan, runs: Runner, console: Console, found: Found) -> None:
    """Runs what was asked for."""
    if plan.suite and plan.knee:
        _suite_knees(plan, runs, console, found.setdefault("knees", []))
    elif plan.suite:
        _suite(plan, runs, console, found.setdefault("lines", []))
        found["verdict"] = judge(found["lines"])
    elif plan.knee:
        found["knee"] = _knee(plan, runs, console)
    elif plan.store_sweep:
        _store_sweep(plan, runs, console, found.setdefault("credit", []))
    else:
        _compare(plan, runs, console, found.setdefault("runs", []))


def _knee(plan: Plan, runs: Runner, console: Console) -> float | None:
    search = Knee(plan.run, BASELINES, plan.seeds, runs, console.print)
    if not search.is_light():
        raise RunError(_CROWDED)
    knee = search.find()
    console.print(f"The knee is at rate {knee:g}" if knee else _NO_KNEE)
    return knee


def _compare(plan: Plan, runs: Runner, console: Console, results: list[Result]) -> None:
    asked = [(rate, policy, seed) for rate in plan.rates for policy in plan.policies for seed in plan.seeds]
    figures = runs(plan.run(policy, seed, rate) for rate, policy, seed in asked)
    try:
        for rate in plan.rates:
            _compare_at(rate, plan, figures, console, results)
    finally:
        if results:
            console.print(_legend(plan, {result.policy for result in results}))


def _compare_at(rate: float, plan: Plan, figures: Iterator[Figures], console: Console, results: list[Result]) -> None:
    found: dict[str, list[Figures]] = {}
    try:
        for policy, seed in product(plan.policies, plan.seeds):
            one = next(figures)
            found.setdefault(policy, []).append(one)
            results.append(Result(plan.requests.workload, policy, rate, seed, one))
    finally:
        if found:
            console.print(table(found, plan.baseline, _title(plan, rate, found)))
    if late := _too_late(plan, rate, found.values()):
        console.print(late)


def _title(plan: Plan, rate: float, found: Mapping[str, Sequence[Figures]]) -> str:
    done, asked = sum(map(len, found.values())), len(plan.policies) * len(plan.seeds)
    early = "" if done == asked else f", {done} of {asked} runs"
    return f"rate {rate:g}, {_requests(next(iter(found.values())))}{early}"


def _too_late(plan: Plan, rate: float, results: Iterable[Sequence[Figures]]) -> str:
    """A sentence on changes that came after the last answer of every run, if there are any."""
    if not plan.changes:
        return ""
    begun = max(plan.requests.rows(seed, rate)[0].timestamp / 1000 for seed in plan.seeds)
    over = begun + max(one.seconds for figures in results for one in figures)
    late = ", ".join(f"{at:g}" for at in sorted({change.at for change in plan.changes if change.at > over}))
    return f"All was over in second {over:.1f}. Nothing came of --change in second {late}." if late else ""


def _requests(figures: Sequence[Figures]) -> str:
    """How many there were with each seed."""
    counts = sorted({one.requests for one in figures})
    return f"{counts[0]} requests" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} requests"


def _legend(plan: Plan, policies: Collection[str]) -> str:
    """`policies`: those of the table."""
    goal, seeds = plan.goal, len(plan.seeds)
    ratio = f"In brackets: the ratio to {plan.baseline}." if has_ratios(policies, plan.baseline) else ""
    certainty = f" ± is half of the 95 % interval over {seeds} seeds." if seeds > 1 else ""
    good = f"Goodput: TTFT within {goal.ttft:g} s and {goal.tpot * 1000:g} ms per token."
    return f"{ratio}{certainty} {good}".strip()


def _suite(plan: Plan, runs: Runner, console: Console, lines: list[Line]) -> None:
    try:
        for line in run_suite(cases(plan.suite_workloads), plan.seeds, runs):
            lines.append(line)
            console.print(f"{line.workload} at {line.load:g} is done")
    finally:
        if lines:
            console.print(suite_table(lines))
    for text in verdicts(lines):
        console.print(text)


def _store_sweep(plan: Plan, runs: Runner, console: Console, lines: list[CreditLine]) -> None:
    try:
        for line in run_credit(plan, runs):
            lines.append(line)
            console.print(f"{line.policy} at {line.gb_s:g} GB/s: {line.ratio:.3f}")
    finally:
        if lines:
            console.print(credit_table(lines))
    for text in credit_verdicts(lines):
        console.print(text)


def _suite_knees(plan: Plan, runs: Runner, console: Console, knees: list[Case]) -> None:
    for case in find_knees(cases(plan.suite_workloads), plan.seeds, runs, console.print):
        knees.append(case)
        more = "" if case.saturates else ", saturates=False"
        console.print(f'    Case("{case.workload}", {case.seconds}, {case.knee}{more}),')
