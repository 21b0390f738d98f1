"""The table at the end, for people, and the same as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.ledger import Ledger

COLUMNS = (
    *("scenario", "faults", "requests", "answered", "refused", "broken with an error", "client left"),
    *(
        "cut with the router",
        "asked again",
        "refused while a worker was well",
        "slowest return, s",
        "lost",
        "violations",
    ),
)


def line(ledger: Ledger) -> list[int | float | str]:
    fates = ledger.fates
    return [
        *(ledger.name, ledger.faults.total(), ledger.carried, fates["answered"], fates["refused"], fates["broken"]),
        *(ledger.left, ledger.cut, ledger.asked_again, ledger.unserved, round(max(ledger.returns, default=0.0), 1)),
        *(ledger.lost, len(ledger.violations)),
    ]


def show(ledgers: Sequence[Ledger]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    table = Table(*COLUMNS)
    for ledger in ledgers:
        table.add_row(*map(str, line(ledger)))
    console.print(table)
    for ledger in ledgers:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(ledger.faults.items()))
        notes = "".join(f"; {name} {note}" for name, note in ledger.notes.items())
        console.print(f"{ledger.name}: {kinds}{notes}", markup=False)
        for violation in ledger.violations:
            console.print(f"\n{ledger.name}: {violation}", markup=False)


def write(path: Path, seed: int, seconds: float, ledgers: Sequence[Ledger]) -> None:
    told = [
        {
            **dict(zip(COLUMNS, line(ledger), strict=True)),
            "kinds": ledger.faults,
            "notes": ledger.notes,
            "violations": ledger.violations,
        }
        for ledger in ledgers
    ]
    path.write_text(json.dumps({"seed": seed, "seconds": round(seconds, 1), "scenarios": told}, indent=1) + "\n")
