"""`python -m tests.fuzz`: every target, or some, for so many executions or seconds; says what failed and how to see it.

The same seed makes the same inputs. A target's executions are made in rounds of ROUND, each with a seed of its own, so
that any number of processes comes to the same.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.engine import Failure, Result, failing, fuzz
from tests.fuzz.targets import ALL

ROUND = 200_000
"""Executions of one target with one seed: enough for a corpus to grow."""
MEMORY = 4 << 30
"""Bytes of address space that a process may have beyond what it began with: what wants more fails."""
_STUCK = 600.0
"""Seconds beyond its time after which a round is stuck where no signal reaches it; its process then tells where."""


class Round(NamedTuple):
    target: str
    seed: str
    executions: int
    seconds: float = float("inf")


def main(argv: list[str] | None = None) -> int:
    """0: nothing failed."""
    arguments = make_parser().parse_args(argv)
    targets = arguments.target or list(ALL)
    if arguments.input:
        return _show(targets, arguments.input.read_bytes())
    for name in targets:  # so that code is compiled once, and in nobody's time
        failing(ALL[name], ALL[name].seeds()[0])
    began, results = time.monotonic(), dict[str, list[Result]]()
    rounds = _rounds(targets, arguments)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(_run, each) for each in rounds]):
            name, result = done.result()
            results.setdefault(name, []).append(result)
            if result.failure:
                _tell(result.failure)
    return _summarise(results, time.monotonic() - began, arguments.json)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--target", action="append", choices=sorted(ALL), metavar="NAME", help=f"repeatable: {', '.join(ALL)}")
    add("--executions", type=int, help="of all targets together, more of the fast ones")
    add("--seconds", type=float, help="instead: of the clock, all targets the same (default: 60)")
    add("--seed", default="1", help="(default %(default)s)")
    add("--jobs", type=int, default=2, help="processes (default %(default)s)")
    add(
        "--input", type=Path, metavar="FILE", help="run this one input, as a failure leaves it, and show what it raises"
    )
    add("--json", type=Path, metavar="FILE", help="write the sums as JSON")
    return parser


def _rounds(targets: list[str], arguments: argparse.Namespace) -> list[Round]:
    if arguments.executions:
        return list(_by_executions(targets, arguments.executions, arguments.seed))
    seconds = (arguments.seconds or 60.0) / len(targets)
    return [
        Round(name, f"{arguments.seed}.{job}", sys.maxsize, seconds)
        for name in targets
        for job in range(arguments.jobs)
    ]


def _by_executions(targets: list[str], executions: int, seed: str) -> Iterator[Round]:
    shares = sum(ALL[name].share for name in targets)
    for name in targets:
        left, number = -(-executions * ALL[name].share // shares), 0
        while left > 0:
            yield Round(name, f"{seed}.{number}", min(ROUND, left))
            left, number = left - ROUND, number + 1


@contextmanager
def _limited() -> Iterator[None]:
    """Little memory, no warnings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        with warnings.catch_warnings(action="error"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _run(each: Round) -> tuple[str, Result]:
    """In a process of its own."""
    logging.disable()  # what is wrong with each input is nobody's news
    faulthandler.dump_traceback_later(min(each.seconds, 3600.0) + _STUCK, exit=True)
    try:
        with _limited():
            return each.target, fuzz(ALL[each.target], each.seed, each.executions, each.seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _tell(failure: Failure) -> None:
    print(f"\nFAILED {failure.target}: {failure.where}, at execution {failure.execution} of seed {failure.seed}")
    print(failure.report)
    print(f"Smallest input ({len(failure.smallest)} bytes): {failure.smallest[:200]!r}")
    folder = Path(tempfile.mkdtemp(prefix="kv-router-fuzz-"))
    (folder / failure.target).write_bytes(failure.smallest)
    print(f"See it:  python -m tests.fuzz --target {failure.target} --input {folder / failure.target}\n", flush=True)


def _show(targets: list[str], data: bytes) -> int:
    for name in targets:
        with _limited():
            error = failing(ALL[name], data)
        print(f"{name}: {'nothing is wrong' if error is None else repr(error)}")
        if error is not None:
            raise error
    return 0


def _summarise(results: dict[str, list[Result]], seconds: float, file: Path | None) -> int:
    print(f"{'target':<20}{'executions':>12}{'a second':>10}{'kept':>8}{'failures':>10}")
    for name in (name for name in ALL if name in results):
        executions, spent = _sum(results[name])
        kept, failures = sum(each.kept for each in results[name]), _failures(results[name])
        print(f"{name:<20}{executions:>12,}{executions / max(spent, 1e-9):>10,.0f}{kept:>8,}{failures:>10}")
    everything = [each for rounds in results.values() for each in rounds]
    failures, memory = _failures(everything), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"in all {_sum(everything)[0]:,} executions in {seconds:.0f} s, {failures} failures, at most {memory} MiB")
    if file:
        file.write_text(json.dumps({"executions": _sum(everything)[0], "failures": failures, "seconds": seconds}))
    return 1 if failures else 0


def _sum(rounds: Iterable[Result]) -> tuple[int, float]:
    return sum(each.executions for each in rounds), sum(each.seconds for each in rounds)


def _failures(rounds: Iterable[Result]) -> int:
    return sum(each.failure is not None for each in rounds)


if __name__ == "__main__":
    sys.exit(main())
