"""`python -m tests.chaos`: exit status 1 on any violation, with the seed and what led there."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.chaos.ledger import Ledger
from tests.chaos.report import show, write
from tests.chaos.run import run_scenario
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.virtual import NAME, run_virtual

VIRTUAL_REQUESTS = 120
"""For each of --seconds, which takes a twentieth of it."""
PER_FAULT = 50
"""Virtual requests."""


def make_parser() -> argparse.ArgumentParser:
    about = "\n".join(f"  {one.name:12} {one.about}" for one in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        epilog=f"Scenarios:\n{about}\n  {NAME:12} Workers that come, go and slow down in virtual time.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, names = parser.add_argument, (*SCENARIOS, NAME)
    add("--seconds", type=float, default=90.0, help="of faults, shared by the scenarios (default: %(default)s)")
    add(
        "--faults", type=int, default=0, metavar="N", help="fewer real ones in all are a failure (default: %(default)s)"
    )
    add("--seed", type=int, help="(default: drawn, and said)")
    add("--scenario", nargs="+", choices=names, default=names, metavar="NAME", help="(default: all)")
    add("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    ledgers = list(_run(options.scenario, options.seconds, seed, folder))
    show(ledgers)
    if any(ledger.violations for ledger in ledgers):
        _say(f"The logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if options.out:
        write(options.out, seed, time.monotonic() - began, ledgers)
    return _verdict(ledgers, options.faults, seed, time.monotonic() - began)


def _run(names: Sequence[str], seconds: float, seed: int, folder: Path) -> Iterator[Ledger]:
    shares = sum(SCENARIOS[name].share for name in names if name != NAME)
    for name in names:
        _say(f"{name} (seed {seed}) …")
        if name == NAME:
            requests = round(VIRTUAL_REQUESTS * seconds)
            yield run_virtual(requests, requests // PER_FAULT, seed)
            continue
        place = folder / name
        place.mkdir()
        yield asyncio.run(run_scenario(SCENARIOS[name], seconds * SCENARIOS[name].share / shares, seed, place))


def _verdict(ledgers: Sequence[Ledger], wanted: int, seed: int, seconds: float) -> int:
    struck = sum(ledger.faults.total() for ledger in ledgers if ledger.name != NAME)
    broken = [ledger.name for ledger in ledgers if ledger.violations]
    _say(f"{struck} faults on processes and sockets in {seconds:.0f} s, seed {seed}.")
    if struck < wanted:
        _say(f"That is less than the {wanted} wanted: give more --seconds.")
    if broken:
        again = shlex.join(["python", "-m", "tests.chaos", "--seed", str(seed), "--scenario", *broken])
        _say(f"Violations in {', '.join(broken)}. Again: {again}")
    return 1 if broken or struck < wanted else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
