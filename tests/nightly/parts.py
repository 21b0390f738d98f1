"""The long tests: how each is run, and which figures its JSON has for the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Figures = dict[str, str]


class Part(NamedTuple):
    """`arguments` without the file; `file`: the flag that names it."""

    name: str
    minutes: float
    """About, on two processors."""
    arguments: tuple[str, ...]
    file: str
    read: Callable[[Any], Figures]


def parts(seed: int) -> list[Part]:
    seeded = ("--seed", str(seed))
    return [
        Part("fuzz", 30, ("tests.fuzz", "--executions", "10000000", *seeded), "--json", _fuzz),
        Part("soak", 33, ("tests.soak", "--minutes", "30", *seeded), "--json", _soak),
        Part("chaos", 35, ("tests.chaos", "--seconds", "1800", "--faults", "10000", *seeded), "--out", _chaos),
        Part("load", 20, ("tests.load",), "--json", _load),
    ]


def _fuzz(told: Any) -> Figures:
    return {"inputs fuzzed": f"{told['executions']:,}", "failures among them": f"{told['failures']:,}"}


def _soak(told: Any) -> Figures:
    answered, failed = told["fates"].get("answered", 0), told["unexplained"]
    return {
        "soak, requests a second": f"{told['rate']:.0f}",
        "soak, requests": f"{sum(told['fates'].values()):,}, {answered:,} answered in full",
        "soak, failed without a worker's death": f"{failed:,}",
        **{f"soak, {found['what']}": f"{found['seen']} (limit {found['limit']})" for found in told["findings"][:4]},
    }


def _chaos(told: Any) -> Figures:
    """Those of virtual time apart."""
    real = [each for each in told["scenarios"] if each["scenario"] != "virtual"]
    figures = {name: sum(each[name] for each in real) for name in ("faults", "requests", "lost")}
    figures["violations"] = sum(len(each["violations"]) for each in told["scenarios"])
    return {f"chaos, {name}": f"{figure:,}" for name, figure in figures.items()}


def _load(told: Any) -> Figures:
    figures = {}
    for row in told:
        held, streams = row["held"], row["streams"]
        if held:
            figures[f"load, {row['router']}, requests a second held"] = f"{held['rate']:,.0f}"
        if streams:
            whole = f"{streams['whole']:,} of {streams['asked']:,} whole, {streams['kilobytes']:.1f} KiB each"
            figures[f"load, {row['router']}, idle streams"] = whole
    return figures
