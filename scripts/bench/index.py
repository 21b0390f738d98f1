"""Our prefix index beside Dynamo's RadixTree: lookups, memory, events. `python -m scripts.bench.index [--quick]`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import NamedTuple

from . import peers
from .pairs import Ratio, order, ratio
from .places import ROOT
from .processes import CannotStart, python_of

SIDES = ("ours", "dynamo")


class IndexRow(NamedTuple):
    """`ours` and `peer` are medians; the ratio is of pairs."""

    what: str
    unit: str
    ours: float
    peer: float
    ratio: Ratio


def run(quick: bool) -> list[IndexRow]:
    """Raises CannotStart when Dynamo is not to be had."""
    if reason := peers.install("ai-dynamo"):
        raise CannotStart(f"ai-dynamo {reason}")
    repeats, calls = (3, 300) if quick else (7, 2000)
    rows = [*_find(64, repeats, calls), *_find(1024, repeats, calls // 2)]
    for entries in (1_000_000,) if quick else (1_000_000, 10_000_000):
        for holders in (1, 8):
            what = f"memory, {entries // 1_000_000} M entries, each block on {holders}"
            rows += _compare(what, {"bytes": "B per (worker, block)"}, 1, "memory", entries, holders)
    units = {"wall": "blocks/s, wall clock", "cpu": "blocks/s of CPU", "decoded": "blocks/s of CPU, reading left out"}
    return [*rows, *_compare("events applied", units, repeats, "events", 200 if quick else 1000)]


def _find(workers: int, repeats: int, calls: int) -> list[IndexRow]:
    cases = {
        "staggered": "µs, i/n each",
        "full": "µs, full match",
        "miss": "µs, miss",
        "mapping": "µs, i/n each, hashes in a list, overlaps as a dict",
    }
    return _compare(f"find_matches, {workers} workers", cases, repeats, "find", workers, calls)


def _compare(what: str, units: dict[str, str], repeats: int, *job: object) -> list[IndexRow]:
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for position in order(len(SIDES), repeat):
            runs[SIDES[position]].append(_side(SIDES[position], *job))
    rows = []
    for key, unit in units.items():
        ours, peer = ([each[key] for each in runs[side]] for side in SIDES)
        rows.append(IndexRow(what, unit, statistics.median(ours), statistics.median(peer), ratio(ours, peer)))
    return rows


def _side(side: str, *job: object) -> dict[str, float]:
    python = sys.executable if side == "ours" else python_of(peers.venv_of("ai-dynamo"))
    command = [python, "-m", "scripts.bench.index_side", side, *map(str, job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"index, {side}, {job}: {done.stderr.strip()[-400:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(f"{row.what}, {row.unit}: ours {row.ours:.4g}, RadixTree {row.peer:.4g}, ratio {row.ratio}")
