"""The arithmetic of paired runs, and the verdicts made of it."""

from __future__ import annotations

import os

import pytest

from scripts.bench.cpu import read_stat, tree_seconds
from scripts.bench.goals import cpu_goals, decision_goals, index_goals, latency_goals
from scripts.bench.index import IndexRow
from scripts.bench.latency import Added
from scripts.bench.pairs import Ratio, order, percentile, ratio
from scripts.bench.proxies import CpuRow

EVEN = Ratio(1.0, 1.0, 1.0)


def test_ratios_are_taken_within_a_repeat() -> None:
    assert ratio([1.0, 8.0, 3.0], [2.0, 4.0, 3.0]) == Ratio(1.0, 0.5, 2.0)


def test_everybody_goes_once_and_another_first_each_time() -> None:
    orders = [order(3, repeat) for repeat in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_cpu_time_survives_a_name_with_blanks_and_parentheses() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    times = f"{ticks} {2 * ticks} {3 * ticks} {4 * ticks}"
    assert read_stat(f"12 (a) b) S 7 1 1 0 -1 0 0 0 0 0 {times} 20 0 1") == (7, 10.0)


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    known = {1: (0, 1.0), 2: (1, 2.0), 3: (2, 4.0), 4: (0, 8.0)}
    assert tree_seconds(1, known) == 7.0
    with pytest.raises(ProcessLookupError):
        tree_seconds(9, known)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(0.8, 0.1, 0.8), "met"),
        (Ratio(0.8, 0.1, 0.9), "met, but not in every repeat"),
        (Ratio(0.81, 0.81, 2.0), "**not met**"),
        (Ratio(0.81, 0.1, 2.0), "**not met**, but in some repeats"),
    ],
)
def test_cpu_goals(ratio: Ratio, verdict: str) -> None:
    row = CpuRow("short", "ours round-robin", 1.0, "vllm-router round_robin", 1.0, ratio)
    assert [goal.verdict for goal in cpu_goals([row])] == [verdict]


def test_cpu_rows_without_a_goal_make_none() -> None:
    told_nothing = CpuRow("long", "ours kv, told nothing", 1.0, "dynamo kv (default tokenizer)", 100.0, EVEN)
    other_load = CpuRow("long", "ours kv", 1.0, "sglang-router cache_aware", 100.0, EVEN)
    assert not list(cpu_goals([told_nothing, other_load]))


def test_who_is_told_nothing_is_held_against_peers_that_are_told_nothing() -> None:
    [goal] = cpu_goals([CpuRow("short", "ours kv, told nothing", 1.0, "sglang-router cache_aware", 1.0, EVEN)])
    assert goal.verdict == "met"


@pytest.mark.parametrize(
    ("ours", "best", "verdict"),
    [
        ((1.0, 0.4, 1.1), (1.2, 0.5, 1.4), "met"),
        ((1.3, 0.4, 1.1), (1.2, 0.5, 1.4), "met, but not in every repeat"),
        ((1.5, 1.5, 1.5), (1.2, 0.5, 1.4), "**not met**"),
        ((1.5, 1.5, 0.4), (1.2, 0.5, 1.4), "**not met**, but in some repeats"),
        ((1.0, 0.4, 1.1), (1.2, -0.5, 1.4), "too noisy to tell"),
        ((1.0, -0.4, 1.1), (1.2, 0.5, 1.4), "too noisy to tell"),
    ],
)
def test_latency_is_held_against_the_best_peer(ours: tuple[float, ...], best: tuple[float, ...], verdict: str) -> None:
    rows = [Added(16, 0.5, "ours kv", ours), Added(16, 0.5, "slow", (9.0, 9.0, 9.0)), Added(16, 0.5, "best", best)]
    [goal] = latency_goals(rows)
    assert goal.verdict == verdict
    assert "best" in goal.peer


def test_index_goals() -> None:
    rows = [
        IndexRow("find_matches, 64 workers", "µs, i/n each", 10.0, 50.0, Ratio(0.2, 0.2, 0.2)),
        IndexRow("find_matches, 1024 workers", "µs, i/n each", 31.0, 200.0, EVEN),
        IndexRow("memory, 1 M entries, each block on 1", "B per (worker, block)", 50.0, 65.0, Ratio(0.8, 0.8, 0.8)),
        IndexRow("events applied", "blocks/s of CPU, reading left out", 1.0, 2.0, Ratio(0.5, 0.5, 1.5)),
    ]
    told = [goal.verdict for goal in index_goals(rows)]
    assert told == ["met", "**not met**", "met", "**not met**, but in some repeats"]


def test_decision_goals() -> None:
    found = {"entries": 1e7, "decision p99": 0.2, "token delay p99.9": 4.0, "token delay p99.9, no events": 1.0}
    assert [goal.verdict for goal in decision_goals(found)] == ["met", "**not met**"]
    noisy = {**found, "token delay p99.9, no events": 2.5}
    assert [goal.verdict for goal in decision_goals(noisy)] == ["met", "too noisy to tell"]
    assert not list(decision_goals({}))
