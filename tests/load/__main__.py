"""`python -m tests.load`: exit status 1 where our router failed a stream, or held nothing."""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from scripts.bench import machine
from scripts.bench.corpus import model_folder
from scripts.bench.load import Outcome
from scripts.bench.measure import load
from scripts.bench.processes import CannotStart
from scripts.bench.report import table
from scripts.bench.routers import Running, fleet, ours, sglang_router, vllm_router
from tests.load.capacity import Held, most
from tests.load.idle_streams import Plan, Streams, hold, slow_worker

WORKERS = 4
CONNECTIONS = 256
FILES_PER_STREAM = 2
"""Of the router, which has the most: the client's and the worker's."""
SPARE_FILES = 500
QUICK = Plan(1000, 2.0), 400.0, 2.0

Start = Callable[[Sequence[str]], AbstractContextManager[Running]]
ROUTERS: dict[str, Start] = {
    "ours": lambda workers: ours("kv", workers, "--tokenizer", str(model_folder())),
    "ours-round-robin": lambda workers: ours("round-robin", workers),
    "vllm-router": lambda workers: vllm_router("cache_aware", workers),
    "sglang-router": lambda workers: sglang_router("cache_aware", workers),
}


class Row(NamedTuple):
    router: str
    held: Held | None
    streams: Streams | None
    trouble: str

    @property
    def good(self) -> bool:
        return bool(self.held and self.held.rate and self.streams and self.streams.good)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(given)
    plan, ceiling, seconds = QUICK if arguments.quick else (Plan(arguments.streams, 10.0), 20_000.0, 5.0)
    plan = _affordable(plan)
    rows = [_row(name, plan, ceiling, seconds) for name in arguments.router or ROUTERS]
    text = page(rows, shlex.join(["scripts/load", *given]))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps([plain(row) for row in rows]))
    return 0 if all(row.good for row in rows if row.router.startswith("ours")) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/load",
        description="Requests a second and idle streams that routers hold, each by itself: about 5 minutes for each.",
    )
    add = parser.add_argument
    add(
        "--router",
        action="append",
        choices=ROUTERS,
        help="repeatable; peers are installed as scripts/bench does (default: all)",
    )
    add("--streams", type=int, default=9000, help="idle ones, that get a token every 10 s (default: %(default)s)")
    add(
        "--quick",
        action="store_true",
        help=f"only {QUICK[0].streams} streams, and no more than {QUICK[1]:g} requests a second",
    )
    add("--out", type=Path, metavar="FILE", help="write what was found as Markdown")
    add("--json", type=Path, metavar="FILE", help="the same as JSON")
    return parser


def _affordable(plan: Plan) -> Plan:
    """With as many open files as may be; fewer streams where that is not enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = (hard - SPARE_FILES) // FILES_PER_STREAM
    if possible < plan.streams:
        print(f"ulimit -Hn is {hard}: {possible} streams instead of {plan.streams}", file=sys.stderr)
    return plan._replace(streams=min(plan.streams, possible))


def _row(name: str, plan: Plan, ceiling: float, seconds: float) -> Row:
    held = streams = None
    try:
        with fleet("load-workers", WORKERS) as workers, ROUTERS[name](workers) as running:
            held = most(lambda rate: _step(running, rate, seconds), ceiling)
        with slow_worker(plan) as url, ROUTERS[name]([url]) as running:
            streams = hold(running, plan)
    except CannotStart as error:
        return Row(name, held, streams, str(error))
    return Row(name, held, streams, "")


def _step(running: Running, rate: float, seconds: float) -> Outcome | None:
    flags = ["--connections", str(CONNECTIONS), "--rate", str(rate), "--seconds", str(seconds), "--warm-up", "1"]
    try:
        outcome = load(running, "short", *flags)
    except RuntimeError as error:
        print(f"{rate:.0f} a second: {error}", file=sys.stderr)
        return None
    print(
        f"{running.name}: {rate:.0f} a second: p99 {outcome.p99 * 1e3:.1f} ms, {outcome.errors} errors", file=sys.stderr
    )
    return outcome


def page(rows: Sequence[Row], command: str) -> str:
    header = (
        "router",
        "requests a second",
        "p99 then, ms",
        "idle streams",
        "held at once",
        "whole",
        "memory each, KiB",
        "",
    )
    facts = [
        *machine.facts(),
        f"{WORKERS} fake workers that answer at once; the load's generator runs on the same processors",
    ]
    return "\n".join(
        [
            "# Load",
            "",
            f"Made by `{command}`; do not edit. What it does: [long-tests.md](../long-tests.md#load).",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            table(header, map(_cells, rows)),
        ]
    )


def _cells(row: Row) -> tuple[str, ...]:
    return tuple(_each_cell(row))


def _each_cell(row: Row) -> Iterator[str]:
    yield row.router
    yield from (f"{row.held.rate:,.0f}", f"{row.held.p99 * 1e3:.1f}") if row.held else ("", "")
    streams = row.streams
    figures = (streams.asked, streams.held, streams.whole) if streams else ()
    yield from (f"{figure:,}" for figure in figures) if streams else ("", "", "")
    yield f"{streams.kilobytes:.1f}" if streams else ""
    yield row.trouble


def plain(row: Row) -> dict[str, object]:
    return {
        "router": row.router,
        "held": row.held and row.held._asdict(),
        "streams": row.streams and row.streams._asdict(),
        "trouble": row.trouble,
    }


if __name__ == "__main__":
    sys.exit(main())
