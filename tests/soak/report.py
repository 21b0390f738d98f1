"""What a soak found, for the terminal and in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.bench import machine
from scripts.bench.report import table
from tests.soak.run import Outcome
from tests.soak.samples import Sample

ROWS = 15
"""Of the table of samples."""
_HEADER = ("at, s", "memory, MB", "open files", "in flight", "overhead p50, ms", "p99, ms")


def summary(outcome: Outcome) -> str:
    lines = [f"{'ok  ' if each.good else 'FAIL'}  {each.what}: {each.seen} ({each.limit})" for each in outcome.findings]
    return "\n".join([*lines, f"      {_fates(outcome)}", *(f"      {fault}" for fault in outcome.faults)])


def page(outcome: Outcome, command: str) -> str:
    findings = [(each.what, each.seen, each.limit, "ok" if each.good else "**not met**") for each in outcome.findings]
    settings = outcome.settings
    return "\n".join(
        [
            "# Soak",
            "",
            f"Made by `{command}`; do not edit. What it does: [long-tests.md](../long-tests.md#soak).",
            "",
            *(f"- {fact}" for fact in machine.facts()),
            f"- {settings.minutes:g} min, {outcome.rate:.0f} requests a second; {settings.engines} simulated engines",
            f"- {_fates(outcome)}",
            "",
            table(("after the warm-up", "seen", "limit", ""), findings),
            table(_HEADER, _rows(outcome.samples)),
        ]
    )


def plain(outcome: Outcome) -> dict[str, Any]:
    findings = [finding._asdict() for finding in outcome.findings]
    return {"rate": outcome.rate, "fates": outcome.fates, "unexplained": outcome.unexplained, "findings": findings}


def _fates(outcome: Outcome) -> str:
    fates = ", ".join(f"{count:,} {fate}" for fate, count in sorted(outcome.fates.items()))
    churn = f"{outcome.deaths} workers killed, {outcome.joins} joined and left"
    return f"{sum(outcome.fates.values()):,} requests: {fates}; {churn}"


def _rows(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """Each is the median of as many samples as it takes."""
    step = max(1, len(samples) // ROWS)
    for start in range(0, len(samples), step):
        part = samples[start : start + step]
        p50 = [each.p50 for each in part if each.p50 is not None]
        p99 = [each.p99 for each in part if each.p99 is not None]
        yield (
            f"{part[-1].at:.0f}",
            f"{statistics.median(s.rss for s in part):.1f}",
            f"{statistics.median(s.descriptors for s in part):.0f}",
            f"{statistics.median(s.in_flight for s in part):.0f}",
            f"{statistics.median(p50):.2f}" if p50 else "",
            f"{statistics.median(p99):.2f}" if p99 else "",
        )
