"""`python -m tests.nightly`: exit status 1 when any part failed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.bench import machine
from scripts.bench.places import ROOT
from scripts.bench.report import table
from tests.nightly.parts import Figures, Part, parts


class Done(NamedTuple):
    part: Part
    status: int
    minutes: float
    figures: Figures


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="nightly-"))
    wanted = [part for part in parts(arguments.seed) if part.name in (arguments.part or [part.name])]
    done = [_run(part, folder) for part in wanted]
    text = page(done)
    print(text)
    print(f"All that was said is in {folder}")
    if arguments.out:
        arguments.out.write_text(text)
    return 1 if any(each.status for each in done) else 0


def make_parser() -> argparse.ArgumentParser:
    known = parts(0)
    times = ", ".join(f"{part.name} {part.minutes:g}" for part in known)
    parser = argparse.ArgumentParser(
        prog="scripts/nightly",
        description=f"{sum(part.minutes for part in known):g} minutes on two processors: {times}. "
        "The machine should have nothing else to do.",
    )
    add = parser.add_argument
    add("--part", action="append", choices=[part.name for part in known], help="repeatable (default: all)")
    add("--seed", type=int, default=1, help="(default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the tables as Markdown")
    return parser


def _run(part: Part, folder: Path) -> Done:
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    command = [sys.executable, "-m", *part.arguments, part.file, str(file)]
    print(f"{part.name}: {' '.join(command[1:])} > {log}", file=sys.stderr, flush=True)
    began = time.monotonic()
    with log.open("wb") as out:
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    figures = part.read(json.loads(file.read_bytes())) if file.exists() else {}
    return Done(part, status, (time.monotonic() - began) / 60, figures)


def page(done: Sequence[Done]) -> str:
    verdicts = [(each.part.name, f"{each.minutes:.0f}", "passed" if not each.status else "**failed**") for each in done]
    figures = [figure for each in done for figure in each.figures.items()]
    return "\n".join(
        [
            "# Long tests",
            "",
            "Made by `scripts/nightly`; do not edit. What the parts do: [long-tests.md](../long-tests.md).",
            "",
            *(f"- {fact}" for fact in machine.facts()),
            "",
            table(("part", "minutes", ""), verdicts),
            table(("figure", "seen"), figures),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
