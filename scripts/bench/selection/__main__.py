"""`python -m scripts.bench.selection`: every arm of every repeat, one after the other, and then a table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from router.ab.cli import cancel_on_signals
from router.ab.errors import RunError
from router.ab.flags import check_writable
from router.ab.trace import Row, describe
from scripts.bench.peers import PEERS

from . import service
from .arms import measure
from .options import DYNAMO, Options, read_options, rotated
from .report import Report, arm_report, judge, sentences, table


def main(argv: list[str]) -> int:
    """Exit status: 2 for what cannot be run or compared, 130 when it was interrupted. A missed goal is no error."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        options = read_options(argv)
        rows = options.plan.rows(options.plan.seed)
        check_writable("--out", options.plan.out)
        if DYNAMO in options.plan.modes:
            service.check()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_run(options, rows, argv, console))
        _show(report, console)
        if options.plan.out:
            Path(options.plan.out).write_bytes(report.encode())
    except RunError as error:
        print(f"selection: {error}", file=sys.stderr)
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 0


async def _run(options: Options, rows: list[Row], argv: Sequence[str], console: Console) -> Report:
    cancel_on_signals()
    plan, started = options.plan, datetime.now(UTC).isoformat(timespec="seconds")
    todo = [(arm, f"{arm}, {turn + 1}") for turn in range(options.repeats) for arm in rotated(plan.modes, turn)]
    measured = [await measure(plan, rows, arm, label, console) for arm, label in todo]
    asked = [row.output_length for row in rows]
    arms = tuple(arm_report(arm, [one for one in measured if one.arm == arm], asked, plan) for arm in plan.modes)
    return Report(
        command=("scripts/bench/selection/run", *argv),
        started=started,
        peer=PEERS[service.PEER].bare[0],
        settings=msgspec.to_builtins(plan),
        trace=describe(rows, plan.rate),
        arms=arms,
        verdicts=judge(arms),
    )


def _show(report: Report, console: Console) -> None:
    trace = report.trace
    heading = (
        f"{trace['requests']:.0f} requests in {trace['seconds']:.0f} s, {trace['input_tokens']:.0f} input and "
        f"{trace['output_tokens']:.0f} output tokens on average, {trace['reuse']:.0%} reusable by one endless cache; "
        f"speed-up {report.settings['speedup']}"
    )
    console.print(heading, highlight=False, soft_wrap=True)
    console.print(table(report.arms))
    for line in sentences(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
