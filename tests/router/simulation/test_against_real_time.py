"""The virtual fleet beside the real-time one: real workers over HTTP, a real router, the same requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

from router.ab.cli import main
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.run import Run, find_policy
from router.simulation.source import Requests

pytestmark = pytest.mark.slow

REQUESTS, WORKERS, CACHE = 60, 3, 65_536
RATE = 4.0
HITS_AGREE = 0.03
"""Of prompt tokens."""
TTFT_AGREES = 0.25
"""Of the virtual mean. Upwards, the milliseconds that HTTP and a busy machine take come on top."""
MACHINE = 0.02
ATTEMPTS = 3
"""The first that is not too slow counts: other work on the machine slows all of one down, and makes none faster."""
STALLS = 0.1
"""The share of requests at either end of the order of TTFT that are left out of both means: a machine that does other
things as well stalls now and then, and a new router's first requests wait for their connections."""


def write_trace(path: Path) -> None:
    """Six conversations in turn, each on its own content; a turn adds 1,536 tokens."""
    rows = []
    for number in range(REQUESTS):
        talk, turn = number % 6, number // 6
        length = 2048 + 1536 * turn
        ids = [talk * 1000 + block for block in range(length // 512)]
        ids += [100_000 + number] if length % 512 else []
        rows.append({"timestamp": 600 * number, "input_length": length, "output_length": 12, "hash_ids": ids})
    path.write_text("\n".join(map(json.dumps, rows)))


def test_the_virtual_fleet_agrees_with_the_real_time_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    fleet = FleetSettings(workers=WORKERS, cache_tokens=CACHE)
    run = Run(Requests(trace=str(trace)), fleet, "round-robin", rate=RATE)
    samples = VirtualFleet(fleet, find_policy("round-robin")).run(run.requests.rows(0, RATE))
    virtual, hit_ratio = middle_mean(sample.ttft for sample in samples), run.figures().hit_ratio
    assert virtual > 2 * MACHINE  # else it would say nothing
    least, most = (1 - TTFT_AGREES) * virtual, (1 + TTFT_AGREES) * virtual + MACHINE
    for _ in range(ATTEMPTS):
        hits, real = measure(trace, tmp_path / "ab.json")
        if real <= most:
            break
    assert hits == pytest.approx(hit_ratio, abs=HITS_AGREE)
    assert least <= real <= most


def measure(trace: Path, out: Path) -> tuple[float, float]:
    """The hit ratio and the mean TTFT in real time."""
    flags = ["--trace", str(trace), "--rate", str(RATE), "--modes", "round-robin", "--speedup", "1"]
    assert main([*flags, "--sim-workers", str(WORKERS), "--cache-tokens", str(CACHE), "--out", str(out)]) == 0
    (mode,) = json.loads(out.read_bytes())["modes"]
    return mode["summary"]["hit_ratio"], middle_mean(one["ttft"] for one in mode["requests"])


def middle_mean(values: Iterable[float | None]) -> float:
    ordered = sorted(value for value in values if value is not None)
    cut = int(len(ordered) * STALLS)
    return fmean(ordered[cut:-cut])
