"""`python -m router simulate`: reads what to simulate, runs it in virtual time, reports."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import msgspec
from rich.console import Console

from router.ab.errors import RunError
from router.ab.flags import check_writable, tell_written, write_all
from router.ab.output import Output
from router.simulation.crediting import credit_table, credit_verdicts, run_credit
from router.simulation.figures import Figures
from router.simulation.knee import FURTHEST, GROWTH, LIGHT, Knee
from router.simulation.plan import BASELINES, Plan, read_plan
from router.simulation.report import as_json, page, suite_table, table, verdicts
from router.simulation.run import Runner, runner
from router.simulation.suite import Line, cases, find_knees, judge, run_suite

NAME = "kv-router simulate"
_NO_KNEE = f"There is no knee up to rate {FURTHEST:g}: mean TTFT stays within {GROWTH:g} times that at rate {LIGHT:g}"
_CROWDED = f"requests wait for each other at rate {LIGHT:g} already, by which a knee is told; give more --workers"


class Result(msgspec.Struct, frozen=True):
    """A run, as shown in the report."""

    workload: str | None
    policy: str
    rate: float
    seed: int
    figures: Figures


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for what cannot be run or written, 130 when interrupted, by SIGTERM too."""
    try:
        plan = read_plan(argv)
        check_writable("--out", plan.out)
        check_writable("--page", plan.page)
        width = None if sys.stdout.isatty() else 140
        console = Output(bool(plan.out or plan.page), width=width, highlight=False, soft_wrap=True)
        with _interrupted_by_sigterm(), runner(plan.jobs) as runs:
            found = _study(plan, runs, console)
    except RunError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{NAME}: interrupted\n")
        return 130
    files = _files(plan, found, argv)
    written = write_all(NAME, files)
    tell_written(written, console)
    console.check()
    return 0 if len(written) == len(files) else 2


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C. If it ended at once, Python would warn of what its processes shared."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _files(plan: Plan, found: Mapping[str, object], argv: Sequence[str]) -> dict[str, bytes]:
    """What is to be written, by path."""
    files: dict[str, bytes] = {}
    if plan.page:
        command = shlex.join(["python", "-m", "router", "simulate", *argv])
        files[plan.page] = page(cast("Sequence[Line]", found["lines"]), command).encode()
    if plan.out:
        files[plan.out] = as_json({"command": [*NAME.split(), *argv], "settings": plan, **found})
    return files


def _study(plan: Plan, runs: Runner, console: Console) -> dict[str, object]:
    """Runs what was asked for; returns the contents of the JSON report besides the settings."""
    if plan.suite:
        return _suite_knees(plan, runs, console) if plan.knee else _suite(plan, runs, console)
    if plan.knee:
        return {"knee": _knee(plan, runs, console)}
    if plan.store_sweep:
        return _store_sweep(plan, runs, console)
    return {"runs": _compare(plan, runs, console)}


def _knee(plan: Plan, runs: Runner, console: Console) -> float | None:
    search = Knee(plan.run, BASELINES, plan.seeds, runs, console.print)
    if not search.is_light():
        raise RunError(_CROWDED)
    knee = search.find()
    console.print(f"The knee is at rate {knee:g}" if knee else _NO_KNEE)
    return knee


def _compare(plan: Plan, runs: Runner, console: Console) -> list[Result]:
    asked = [(rate, policy, seed) for rate in plan.rates for policy in plan.policies for seed in plan.seeds]
    found = runs(plan.run(policy, seed, rate) for rate, policy, seed in asked)
    results: list[Result] = []
    for rate in plan.rates:
        per_policy = {policy: [next(found) for _ in plan.seeds] for policy in plan.policies}
        for policy, figures in per_policy.items():
            pairs = zip(plan.seeds, figures, strict=True)
            results += [Result(plan.requests.workload, policy, rate, seed, one) for seed, one in pairs]
        console.print(table(per_policy, plan.baseline, f"rate {rate:g}, {_requests(per_policy[plan.baseline])}"))
        if late := _too_late(plan, rate, per_policy.values()):
            console.print(late)
    console.print(_legend(plan))
    return results


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


def _legend(plan: Plan) -> str:
    goal, seeds = plan.goal, len(plan.seeds)
    certainty = f" ± is half of the 95 % interval over {seeds} seeds." if seeds > 1 else ""
    good = f"Goodput: TTFT within {goal.ttft:g} s and {goal.tpot * 1000:g} ms per token."
    return f"In brackets: the ratio to {plan.baseline}.{certainty} {good}"


def _suite(plan: Plan, runs: Runner, console: Console) -> dict[str, object]:
    lines = []
    for line in run_suite(cases(plan.suite_workloads), plan.seeds, runs):
        lines.append(line)
        console.print(f"{line.workload} at {line.load:g} is done")
    console.print(suite_table(lines))
    for text in verdicts(lines):
        console.print(text)
    return {"lines": lines, "verdict": judge(lines)}


def _store_sweep(plan: Plan, runs: Runner, console: Console) -> dict[str, object]:
    lines = []
    for line in run_credit(plan, runs):
        lines.append(line)
        console.print(f"{line.policy} at {line.gb_s:g} GB/s: {line.ratio:.3f}")
    console.print(credit_table(lines))
    for text in credit_verdicts(lines):
        console.print(text)
    return {"credit": lines}


def _suite_knees(plan: Plan, runs: Runner, console: Console) -> dict[str, object]:
    knees = []
    for case in find_knees(cases(plan.suite_workloads), plan.seeds, runs, console.print):
        knees.append(case)
        more = "" if case.saturates else ", saturates=False"
        console.print(f'    Case("{case.workload}", {case.seconds}, {case.knee}{more}),')
    return {"knees": knees}
