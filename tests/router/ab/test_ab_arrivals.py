from __future__ import annotations

import itertools
import statistics

import pytest

from router.ab.arrivals import Arrivals, rearrive
from router.ab.trace import Row, synthesize

ROWS = [Row(100.0 * index, 8, 2, (index,)) for index in range(5000)]
"""Ten a second, evenly."""


def gaps(rows: list[Row]) -> list[float]:
    return [later.timestamp - row.timestamp for row, later in itertools.pairwise(rows)]


def test_the_traces_own_are_kept() -> None:
    assert rearrive(ROWS, "trace", 0) == ROWS
    assert rearrive(ROWS[:1], "poisson", 0) == ROWS[:1]


@pytest.mark.parametrize("arrivals", ["poisson", "bursts"])
def test_drawn_ones_keep_order_and_rate(arrivals: Arrivals) -> None:
    drawn = rearrive(ROWS, arrivals, 1)
    assert [row.hash_ids for row in drawn] == [row.hash_ids for row in ROWS]
    assert min(gaps(drawn)) >= 0
    assert statistics.mean(gaps(drawn)) == pytest.approx(100, rel=0.1)
    assert drawn == rearrive(ROWS, arrivals, 1)
    assert drawn != rearrive(ROWS, arrivals, 2)


def test_how_much_they_vary() -> None:
    """A Poisson process' gaps have the mean as their deviation; bursts more."""
    assert statistics.stdev(gaps(rearrive(ROWS, "poisson", 1))) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(gaps(rearrive(ROWS, "bursts", 1))) > 115


@pytest.mark.parametrize("seconds", [20, 50, 200])
def test_a_short_trace_has_bursts_too(seconds: int) -> None:
    """Its mean rate is kept, though it may be over before a minute is, in which a long one has one burst."""
    rows = ROWS[: 10 * seconds]
    drawn = [rearrive(rows, "bursts", seed) for seed in range(20)]
    assert statistics.mean(one[-1].timestamp for one in drawn) == pytest.approx(1000 * seconds, rel=0.1)
    assert statistics.mean(statistics.stdev(gaps(one)) / statistics.mean(gaps(one)) for one in drawn) > 1.15


def test_a_synthetic_trace_can_be_rearranged() -> None:
    rows = synthesize("agent", 0)
    assert len(rearrive(rows, "bursts", 0)) == len(rows)
