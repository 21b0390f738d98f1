"""`python -m router ab`: plans a run, goes through its modes one after the other, reports."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from router.ab import children, workers
from router.ab.client import Address
from router.ab.errors import RunError
from router.ab.machine import Cost, Meter
from router.ab.plan import UNROUTED, Plan, mode_of, read_plan
from router.ab.progress import progress
from router.ab.replay import Pace, Prompts, replay
from router.ab.report import ModeReport, Report, ratios, show, warnings
from router.ab.statistics import Record, summarise
from router.ab.trace import Row, reuse
from router.worker_spec import parse_worker


def main(argv: list[str]) -> int:
    """Exit status: 2 for what cannot be run, 1 when a mode answered no request at all, 130 when it was interrupted."""
    try:
        plan = read_plan(argv)
        rows = plan.rows()
        _check_writable(plan.out)
        console = Console(width=None if sys.stdout.isatty() else 120)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_run(plan, rows, argv, console))
    except RunError as error:
        sys.stderr.write(f"kv-router ab: {error}\n")
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("kv-router ab: interrupted; the fleet and the router were ended\n")
        return 130
    show(report, console)
    if plan.out:
        Path(plan.out).write_bytes(report.encode())
        console.print(f"Written to {plan.out}", highlight=False)
    return 1 if any(mode.summary.errors == mode.summary.requests for mode in report.modes) else 0


class _Measured(NamedTuple):
    """A mode's raw results, before there is a baseline to compare with."""

    label: str
    records: list[Record]
    cost: Cost
    refused: list[str]
    workers: int


async def _run(plan: Plan, rows: list[Row], argv: Sequence[str], console: Console) -> Report:
    _cancel_on_signals()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    measured = [await _measure(plan, rows, label, console) for label in plan.modes]
    return _report(plan, rows, argv, started, measured)


def _cancel_on_signals() -> None:
    """Ctrl-C and SIGTERM leave by way of every `finally`, so that nothing that was started stays."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - narrows the type
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _measure(plan: Plan, rows: list[Row], label: str, console: Console) -> _Measured:
    """One mode, from a fleet with empty caches to its records."""
    meter = Meter()
    async with _fleet(plan) as named:
        urls = [url_of(worker) for worker in named]
        prompts = Prompts(await workers.served_model(urls, plan.model), plan.seed, plan.timeout)
        refused = [] if plan.simulated else await workers.reset_caches(urls)
        # The router comes up after the caches are empty, so that it knows nothing of the mode before.
        async with _targets(plan, label, named) as targets:
            with progress(console, label, len(rows)) as advance:
                records = await replay(rows, targets, Pace(plan.rate, plan.speedup), prompts, advance)
    cost = meter.read(sum(record.chunks for record in records))
    return _Measured(label, records, cost, refused, len(named))


@asynccontextmanager
async def _fleet(plan: Plan) -> AsyncIterator[Sequence[str]]:
    """The workers as the router takes them: those given, or a simulated fleet of this mode's own."""
    if plan.workers:
        yield plan.workers
        return
    sizes = ["--workers", str(plan.sim_workers), "--cache-tokens", str(plan.cache_tokens)]
    sizes += ["--block-size", str(plan.block_size), "--speedup", f"{plan.speedup:g}"]
    async with children.fleet(["--port", "0", *sizes, *plan.sim_args]) as urls:
        yield urls


@asynccontextmanager
async def _targets(plan: Plan, label: str, named: Sequence[str]) -> AsyncIterator[list[Address]]:
    """Where requests go in a mode: the router, or the workers themselves."""
    if mode_of(label) == UNROUTED:
        yield [Address.parse(url_of(worker)) for worker in named]
        return
    flags = ["--seed", str(plan.seed), "--log-level", "warning", *plan.router_args]
    async with children.router(mode_of(label), named, flags) as url:
        yield [Address.parse(url)]


def url_of(worker: str) -> str:
    """The URL of a worker as given to --worker."""
    return parse_worker(worker).url


def _report(plan: Plan, rows: list[Row], argv: Sequence[str], started: str, measured: Sequence[_Measured]) -> Report:
    summaries = {one.label: summarise(one.records, one.workers) for one in measured}
    modes = tuple(
        ModeReport(
            mode=one.label,
            summary=summaries[one.label],
            cost=one.cost,
            warnings=warnings(one.records, summaries[one.label], one.cost, one.refused, plan),
            ratios=ratios(summaries[one.label], summaries[plan.baseline]),
            requests=tuple(one.records),
        )
        for one in measured
    )
    return Report(
        command=("kv-router", "ab", *argv),
        started=started,
        versions=_versions(),
        settings=msgspec.to_builtins(plan),
        trace=_describe(rows, plan.rate),
        baseline=plan.baseline,
        modes=modes,
    )


def _describe(rows: Sequence[Row], rate: float) -> dict[str, float]:
    """The load as it was sent: seconds are simulated, tokens are means."""
    return {
        "requests": len(rows),
        "seconds": (rows[-1].timestamp - rows[0].timestamp) / 1000 / rate,
        "input_tokens": sum(row.input_length for row in rows) / len(rows),
        "output_tokens": sum(row.output_length for row in rows) / len(rows),
        "reuse": reuse(rows),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("kv-aware-router", "uvloop", "httptools"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check_writable(out: str | None) -> None:
    """Before the run, not after it."""
    if out is None:
        return
    try:
        with Path(out).open("ab"):
            pass
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}; give --out another FILE") from None
