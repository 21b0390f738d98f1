"""The command line: `scripts/bench/run [--quick] [PART ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from . import decision, index
from .measure import Effort
from .places import ROOT, cache_folder
from .processes import CannotStart, interrupt_on_signals
from .proxies import Findings, cache_aware, dynamo_kv, latency, nothing, round_robin
from .report import Results, page

_Found = TypeVar("_Found")
PAGE = ROOT / "docs" / "benchmarks.md"
PROXIES: dict[str, Callable[[Effort, Findings], None]] = {
    "round-robin": round_robin,
    "cache-aware": cache_aware,
    "dynamo": dynamo_kv,
    "latency": latency,
}
PARTS = (*PROXIES, "index", "decision")


def run() -> int:
    """Exit status: 130 when it was interrupted."""
    interrupt_on_signals()
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted; what it had started was ended", file=sys.stderr)
        return 130


def main() -> int:
    args = read_arguments()
    parts, quick = args.parts or PARTS, args.quick
    effort = Effort(3, 0.6, quick=True) if quick else Effort(5, 2.0)
    proxies, before = nothing(), os.getloadavg()[1]
    for name, measure in PROXIES.items():
        if name in parts:
            _attempt(name, proxies, lambda run=measure: run(effort, proxies))  # type: ignore[misc]  # mypy cannot infer the lambda's default
    rows = _attempt("index", proxies, lambda: index.run(quick)) if "index" in parts else None
    decided = _attempt("decision", proxies, lambda: decision.run(quick)) if "decision" in parts else None
    busy = f"load average over 5 minutes {before:.1f} before the first run"
    text = page(Results(proxies, rows or [], decided or {}, busy, " ".join(["scripts/bench/run", *sys.argv[1:]])))
    print(text)
    if not quick and set(parts) == set(PARTS):
        PAGE.write_text(text)
    else:
        (cache_folder() / "last.md").write_text(text)
    return 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description="This router beside its peers.")
    parser.add_argument("--quick", action="store_true", help="under 3 minutes, to be read with care; writes no page")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(PARTS)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return args


def _attempt(name: str, found: Findings, part: Callable[[], _Found]) -> _Found | None:
    """A part that fails is said in the page, and the others go on."""
    print(f"-- {name}", file=sys.stderr)
    began = time.monotonic()
    try:
        return part()
    except (CannotStart, RuntimeError) as error:
        found.missing.append(f"{name}: {error}")
        print(f"{name}: {error}", file=sys.stderr)
        return None
    finally:
        print(f"-- {name} took {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run())
