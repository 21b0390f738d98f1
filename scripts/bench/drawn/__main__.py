"""Draws, looks for each workload's knee, and sets `auto` beside the best baseline below and above it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec

from router.ab.flags import count, taking
from router.ab.trace import Row
from router.simulation.figures import Figures
from router.simulation.fleet import FleetSettings
from router.simulation.knee import FURTHEST, Knee
from router.simulation.plan import BASELINES, POLICIES
from router.simulation.run import Run, Runner, runner
from router.simulation.source import Requests
from router.simulation.suite import LOADS, SATURATED, Line, e2e_mean, tpot_mean, ttft_mean, ttft_p99
from scripts.bench.drawn.drawing import Serving, draw

_DESCRIPTION = """\
auto beside five baselines in virtual time, on workloads and fleets drawn at random, at 0.6, 0.9 and 1.1 of each one's
knee. A number draws the same every time. Compiled (scripts/compile) it takes about two minutes for each on one core."""


def main() -> None:
    given = _make_parser().parse_args()
    first, end = given.cases
    ratios: dict[float, list[float]] = {load: [] for load in LOADS}
    with runner(given.jobs) as runs, TemporaryDirectory() as folder:
        for number in range(first, end):
            for line in _lines(*draw(number, given.requests, given.serving), number, Path(folder), runs):
                ratios[line.load].append(line.ratio(ttft_mean))
                print(_shown(line), flush=True)
    saturated = [ratio for load, found in ratios.items() if load >= SATURATED for ratio in found]
    worst = max(max(found) for found in ratios.values())
    print(f"auto over the best baseline: {fmean(saturated):.3f} on average at 0.9 and 1.1, {worst:.3f} at most")


def _lines(rows: list[Row], fleet: FleetSettings, number: int, folder: Path, runs: Runner) -> Iterator[Line]:
    trace = Requests(trace=str(_written(rows, folder / f"{number}.jsonl")))

    def make(policy: str, seed: int, rate: float) -> Run:
        return Run(trace, fleet, policy, seed, rate)

    knee = Knee(make, BASELINES, (0,), runs, lambda _: None).find() or FURTHEST
    print(f"{number}: {_about(rows, fleet)}; knee at {knee:g}", flush=True)
    found = runs(make(policy, 0, load * knee) for load in LOADS for policy in POLICIES)
    for load in LOADS:
        figures: dict[str, list[Figures]] = {policy: [next(found)] for policy in POLICIES}
        yield Line(str(number), load, load * knee, figures)


def _written(rows: list[Row], path: Path) -> Path:
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return path


def _about(rows: list[Row], fleet: FleetSettings) -> str:
    prompts = sorted(row.input_length for row in rows)
    speed = fleet.timing.prefill_tokens_per_s
    told = f"{fleet.workers} workers, {len(fleet.slow)} of them slower, {fleet.cache_tokens:,} tokens of cache each"
    if fleet.prefill:
        told += f", {fleet.prefill} of them for prompts"
    if fleet.store_tokens:
        told += f", a store of {fleet.store_tokens:,} at {fleet.store_gb_s:.0f} GB/s"
    return f"{told}, prefill {speed:,.0f} tokens/s; prompts of {prompts[len(prompts) // 2]:,} tokens at the median"


def _shown(line: Line) -> str:
    ours, best = line.mean("auto", ttft_mean), line.best(ttft_mean)
    against = f"{ours:.3f} s, {best} {line.mean(best, ttft_mean):.3f} s"
    return f"  at {line.load}: {against}: {line.ratio(ttft_mean):.3f}{_others(line)}"


def _others(line: Line) -> str:
    ratios = {"p99": ttft_p99, "TPOT": tpot_mean, "E2E": e2e_mean}
    return "".join(f"; {name} {line.ratio(of):.2f}" for name, of in ratios.items())


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition("-")
    numbers = int(first), int(end or first) + 1
    if not 0 <= numbers[0] < numbers[1]:
        raise ValueError
    return numbers


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench/drawn/run", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--cases",
        type=taking("a number or two such as 0-11", _range),
        default=(0, 12),
        metavar="A-B",
        help="their numbers (default: 0-11)",
    )
    parser.add_argument(
        "--serving",
        choices=get_args(Serving),
        default="whole",
        help="whole requests, prompts and answers in parts, or workers that share a store (default: %(default)s)",
    )
    parser.add_argument("--requests", type=count, default=2_500, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="processes (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
