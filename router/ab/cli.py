"""`python -m router ab`: plans a run, measures its modes one after the other, and reports."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from router.ab import children, live, workers
from router.ab.arrivals import check_ends
from router.ab.client import Address, send
from router.ab.errors import RunError
from router.ab.figures import ratios
from router.ab.flags import check_writable, tell_written, write_all
from router.ab.machine import Cost, Meter
from router.ab.output import Output
from router.ab.plan import UNROUTED, Plan, mode_of, read_plan
from router.ab.progress import progress
from router.ab.replay import Pace, Prompts, replay
from router.ab.report import ModeReport, Report, comparison, show, warnings
from router.ab.statistics import NOTHING, Record, Summary, summarise
from router.ab.trace import Row, describe
from router.ab.trace_file import check_readable
from router.open_files import raise_limit
from router.page.html import page
from router.page.results import run_name
from router.security.worker_access import WorkerAccess
from router.workers.spec import parse_worker

_GOODBYE = 0.25
"""Seconds for TLS connections to close, for which aiohttp does not wait (see "Graceful shutdown" in its docs)."""

Loads = Mapping[int, list[Row]]
"""The requests to send, by seed."""


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for what cannot be run or written, 1 when a mode answered no request at all, 130 when
    interrupted, in which case the runs finished by then are reported."""
    if argv[:1] == ["report"]:
        return live.main(argv[1:])
    try:
        plan, access, loads = prepare(argv)
    except RunError as error:
        sys.stderr.write(f"kv-router ab: {error}\n")
        return 2
    started = datetime.now(UTC).isoformat(timespec="seconds")
    console = Output(bool(plan.out or plan.html), width=None if sys.stdout.isatty() else 120)
    measured: list[_Measured] = []
    status = _run_all(plan, access, loads, console, measured)
    if not measured:
        return status
    report = _report(plan, argv, started, measured)
    files = _files(plan, report)
    written = write_all("kv-router ab", files)
    show(report, console)
    tell_written(written, console)
    console.check()
    if len(written) < len(files):
        return 2
    return status or (1 if any(mode.summary.errors == mode.summary.requests for mode in report.modes) else 0)


def prepare(argv: Sequence[str]) -> tuple[Plan, WorkerAccess, Loads]:
    """All that can be read and checked before a run. Raises RunError."""
    plan = read_plan(argv)
    access = plan.access()
    if len(plan.seeds) > 1:
        check_readable(plan.trace)
    loads = {seed: plan.rows(seed) for seed in plan.seeds}
    slowest = Pace(min(plan.rates), plan.speedup)
    check_ends(max(slowest.wall(rows[-1].timestamp - rows[0].timestamp) for rows in loads.values()))
    check_writable("--out", plan.out)
    check_writable("--html", plan.html)
    return plan, access, loads


def _run_all(plan: Plan, access: WorkerAccess, loads: Loads, console: Console, measured: list[_Measured]) -> int:
    """Makes all runs and appends their results to `measured`. Returns the exit status."""
    raise_limit()  # each request that is under way has a connection, and an open loop waits for none of them
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(plan, access, loads, console, measured))
    except RunError as error:
        sys.stderr.write(f"kv-router ab: {error}{_so_far(plan, measured)}\n")
        return 2
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write(f"kv-router ab: interrupted; what it had started was ended{_so_far(plan, measured)}\n")
        return 130
    return 0


def _so_far(plan: Plan, measured: Sequence[_Measured]) -> str:
    runs = len(plan.rates) * len(plan.seeds) * len(plan.modes)
    return f"; reported of {runs} runs: the first {len(measured)}" if measured else ""


def _files(plan: Plan, report: Report) -> dict[str, bytes]:
    """What is to be written, by path."""
    files = {plan.out: report.encode()} if plan.out else {}
    return files | ({plan.html: page(comparison(report)).encode()} if plan.html else {})


class _Run(NamedTuple):
    """One run of a plan."""

    label: str
    rate: float
    seed: int
    rows: list[Row]


class _Measured(NamedTuple):
    """The results of a run, before it is compared with a baseline."""

    run: _Run
    records: list[Record]
    cost: Cost
    refused: list[str]
    workers: int
    """0: which worker served a request is not known."""


async def _run(plan: Plan, access: WorkerAccess, loads: Loads, console: Console, measured: list[_Measured]) -> None:
    """Makes all runs. Modes of one rate and seed follow each other, so that other load on the machine is alike."""
    cancel_on_signals()
    runs = [_Run(label, rate, seed, loads[seed]) for rate in plan.rates for seed in plan.seeds for label in plan.modes]
    try:
        for name, url in plan.peers.items():
            await workers.check_reached(f"--peer {name}", Address.parse(url))
        for run in runs:
            measured.append(await _measure(plan, access, run, console))  # noqa: PERF401 -- they stay when one fails
    finally:
        if any(url_of(worker).startswith("https:") for worker in plan.workers):
            await asyncio.sleep(_GOODBYE)


def cancel_on_signals() -> None:
    """Cancels the task on Ctrl-C, on SIGTERM, and when the terminal is gone (except under `nohup`), so that every
    `finally` runs and no child is left."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - narrows the type
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,))):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _measure(plan: Plan, access: WorkerAccess, run: _Run, console: Console) -> _Measured:
    """Measures one mode, on a fleet whose caches are empty."""
    meter = Meter()
    async with _fleet(plan) as named:
        urls = [url_of(worker) for worker in named]
        prompts = Prompts(await workers.served_model(urls, access, plan.model), run.seed)
        refused = [] if plan.simulated else await workers.reset_caches(urls, access, prompts.model)
        # The router is started after the caches are emptied, so that it knows nothing of the previous mode.
        async with _targets(plan, run, named, access) as targets:
            with progress(console, run_name(run.label, run.rate, run.seed, plan.single), len(run.rows)) as advance:
                sends = [partial(send, target, timeout=plan.timeout) for target in targets]
                records = await replay(run.rows, sends, Pace(run.rate, plan.speedup), prompts, advance)
    cost = meter.read(sum(record.chunks for record in records))
    return _Measured(run, records, cost, refused, 0 if run.label in plan.peers else len(named))


@asynccontextmanager
async def _fleet(plan: Plan) -> AsyncIterator[Sequence[str]]:
    """The workers, as given to `--worker`: the plan's, or a simulated fleet started for this mode."""
    if plan.workers:
        yield plan.workers
        return
    async with children.fleet(plan.fleet_flags) as urls:
        yield urls


@asynccontextmanager
async def _targets(plan: Plan, run: _Run, named: Sequence[str], access: WorkerAccess) -> AsyncIterator[list[Address]]:
    """The addresses that requests go to in a mode: the router's, another router's, or the workers' own."""
    mode = mode_of(run.label)
    if mode in plan.peers:
        yield [Address.parse(plan.peers[mode])]
        return
    if mode == UNROUTED:
        yield [Address.parse(url_of(worker), access) for worker in named]
        return
    async with children.router(mode, named, plan.router_flags(run.seed)) as url:
        yield [Address.parse(url)]


def url_of(worker: str) -> str:
    """The URL of a worker as given to --worker."""
    return parse_worker(worker).url


def _report(plan: Plan, argv: Sequence[str], started: str, measured: Sequence[_Measured]) -> Report:
    summaries = {one.run[:3]: summarise(one.records, one.workers, plan.ttft_slo) for one in measured}
    first = measured[0].run
    return Report(
        command=("kv-router", "ab", *argv),
        started=started,
        versions=_versions(),
        settings=msgspec.to_builtins(plan),
        trace=describe(first.rows, first.rate),
        baseline=plan.baseline,
        modes=tuple(_mode_report(plan, one, summaries) for one in measured),
    )


def _mode_report(plan: Plan, one: _Measured, summaries: Mapping[tuple[str, float, int], Summary]) -> ModeReport:
    label, rate, seed, rows = one.run
    summary, asked = summaries[label, rate, seed], [row.output_length for row in rows]
    return ModeReport(
        mode=label,
        rate=rate,
        seed=seed,
        workers=one.workers,
        summary=summary,
        cost=one.cost,
        warnings=warnings(one.records, asked, summary, one.cost, one.refused, plan),
        ratios=ratios(summary, summaries.get((plan.baseline, rate, seed), NOTHING)),
        requests=tuple(one.records),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("kv-aware-router", "uvloop", "httptools"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
