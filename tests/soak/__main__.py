"""`python -m tests.soak`: exit status 1 when the router did not stay as it was."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.soak.load import TooMuch
from tests.soak.report import page, plain, summary
from tests.soak.run import Settings, soak
from tests.soak.verdict import Limits


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(given)
    limits = Limits(arguments.most_growth, arguments.most_slower)
    settings = Settings(arguments.minutes, arguments.rate, arguments.engines, arguments.churn, arguments.seed, limits)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        outcome = asyncio.run(soak(settings, folder, lambda text: print(text, flush=True)))
    except TooMuch as error:
        print(f"{error}; the logs are in {folder}")
        return 1
    print(summary(outcome))
    if arguments.out:
        arguments.out.write_text(page(outcome, shlex.join(["scripts/soak", *given])))
    if arguments.json:
        arguments.json.write_text(json.dumps(plain(outcome)))
    if outcome.good:
        shutil.rmtree(folder)
    else:
        print(f"The logs are in {folder}")
    return 0 if outcome.good else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    add, limits = parser.add_argument, Limits()
    add("--minutes", type=float, default=30.0, help="under load (default: %(default)g)")
    add("--rate", type=float, help="requests a second (default: what takes 70 %% of the processors, found out first)")
    add("--engines", type=int, default=3, help="simulated, beside one that joins and leaves (default: %(default)s)")
    add("--churn", type=float, default=10.0, help="seconds between two deaths of a worker (default: %(default)g)")
    add("--seed", type=int, default=1, help="(default: %(default)s)")
    add("--most-growth", type=float, default=limits.growth, help="of memory, a share (default: %(default)g)")
    add("--most-slower", type=float, default=limits.slower, help="last quarter by the first (default: %(default)g)")
    add("--out", type=Path, metavar="FILE", help="write what was found as Markdown")
    add("--json", type=Path, metavar="FILE", help="the same as JSON, without the samples")
    return parser


if __name__ == "__main__":
    sys.exit(main())
