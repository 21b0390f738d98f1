"""What was found as Markdown: docs/benchmarks.md is this page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import machine
from .goals import Goal, cpu_goals, decision_goals, index_goals, latency_goals
from .index import IndexRow
from .peers import PEERS
from .proxies import Findings
from .workloads import WORKLOADS

_INTRODUCTION = """\
# Benchmarks

Made by `{command}`; do not edit. Everything runs on one machine, on 127.0.0.1, one router under load at a time.

{facts}
"""

_HOW = """\
## How it is measured
- **CPU per request**: user and system time of the router's process with all its threads and children (of Dynamo the
  front end alone, without its mocker), from `/proc`, divided by the requests of a closed loop: 32 connections, 64 for
  streams. Each repeat measures every router once, another first each time; a ratio is taken within a repeat. Given are
  medians, and of ratios the least and the greatest in parentheses. A goal is met or not by the medians, "but not in
  every repeat" or "but in some repeats" where that is otherwise for some of them.
- **Prompts** are passages from the docstrings of Python's standard library, none like another; conversations grow from
  20 to 60 kB by 2 kB a turn. The tokenizer is a byte-level BPE of 8,192 entries trained on the same text (so prompts
  make about as few tokens as with a real one: 40 kB are 9,500), with a template like ChatML.
- **Workers**: 4 fake vLLM engines in one process that answer at once, streams in 64 chunks, each a packet of its own,
  one every 5 ms. In kv mode each has a cache of 262,144 tokens, full soon after the start: it tokenises every prompt,
  evicts what is least recently used and publishes both over ZMQ as vLLM does, removals one by one. Our router reads,
  hashes and applies all of that itself, and the CPU time for it is in its figure; with "publishers apart" a publisher
  beside each engine does that, as Dynamo has it, and the router applies hashes from NATS; "told nothing" hears no
  events and predicts, as the others' cache_aware does. Dynamo's worker is its own mocker with as large a cache and
  infinite speed, whose tokens come unpaced.
- **Added latency**: open loop, random arrivals at a fixed rate, a short answer at once; the difference from the same
  percentile straight to a worker in the same repeat, medians over the repeats. Workers have no cache here.
- **Index**: the same hashes into `indexer.prefix_index.PrefixIndex` and, through its Python binding, Dynamo's
  `RadixTree`, each in processes of its own. A look-up ends with the overlap of every worker in the form in which a cost
  function reads it: ours takes the prompt's hashes as the array that the router holds and gives an array by rank, the
  binding takes a list and gives a dictionary, its only forms. The row "hashes in a list, overlaps as a dict" makes ours
  take and give the same. The binding takes events as JSON: "reading left out" subtracts the CPU time of reading the
  same events alone.
- **Decision**: see `scripts/bench/decision.py`.
"""


class Results(NamedTuple):
    proxies: Findings
    lookups: list[IndexRow]
    decision: dict[str, float]
    busy: str
    """What else kept the machine busy."""
    command: str


def goals(results: Results) -> list[Goal]:
    return [
        *cpu_goals(results.proxies.cpu),
        *latency_goals(results.proxies.latency),
        *index_goals(results.lookups),
        *decision_goals(results.decision),
    ]


def page(results: Results) -> str:
    parts = [
        _INTRODUCTION.format(command=results.command, facts=_list(_facts(results))),
        "## Goals\nWhat bounds those not met: [hot-path.md](hot-path.md).\n\n" + _goal_table(goals(results)),
        "## CPU per request\n" + _cpu_table(results.proxies),
        "## Added latency\n" + _latency_table(results.proxies),
        "## Prefix index\n" + _index_table(results.lookups),
        "## Routing decision\n" + _decision_table(results.decision),
        "## What could not be measured\n" + _list(dict.fromkeys(results.proxies.missing))
        if results.proxies.missing
        else "",
        _HOW,
        "## Commands\n" + _list(f"{name}: `{line}`" for name, line in results.proxies.commands.items()),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _goal_table(rows: Iterable[Goal]) -> str:
    cells = [(row.goal, row.ours, row.peer, row.ratio, row.verdict) for row in rows]
    return table(("goal", "ours", "peer", "ours / peer", ""), cells)


def _cpu_table(found: Findings) -> str:
    cells = [
        (WORKLOADS[row.workload].title, row.ours_name, f"{row.ours:,.0f}", row.peer_name, f"{row.peer:,.0f}", row.ratio)
        for row in found.cpu
    ]
    idle = ", ".join(f"{name} {value:.1f}" for name, value in found.idle.items())
    header = ("load", "ours", "µs", "beside", "µs", "ratio")
    return table(header, cells) + f"\nWithout any request, milliseconds of CPU a second: {idle or 'not taken'}.\n"


def _latency_table(found: Findings) -> str:
    cells = [
        (
            row.connections,
            f"p{row.share * 100:g}",
            row.router,
            f"{row.median:.2f}",
            f"{row.least:.2f}–{row.greatest:.2f}",
        )
        for row in found.latency
    ]
    return table(("connections", "", "router", "ms", "least–greatest"), cells)


def _index_table(rows: Iterable[IndexRow]) -> str:
    cells = [(row.what, row.unit, f"{row.ours:,.4g}", f"{row.peer:,.4g}", row.ratio) for row in rows]
    return table(("", "unit", "ours", "RadixTree", "ratio"), cells)


def _decision_table(found: dict[str, float]) -> str:
    return table(("", "ms"), [(name, f"{value:,.3f}") for name, value in found.items() if name != "entries"])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _facts(results: Results) -> list[str]:
    peers = "; ".join(", ".join(p for p in [*peer.bare, *peer.packages] if "==" in p) for peer in PEERS.values())
    return [
        *machine.facts(),
        f"Peers: {peers}",
        *(f"{name}: {peer.note}" for name, peer in PEERS.items() if peer.note),
        f"Other work on the machine: {results.busy}",
        f"Requests that failed: {results.proxies.sent}",
    ]
