"""The KV-aware cost and the softmax over it, against independent computations."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.scheduling.cheapest import Cheapest, sample_softmax
from router.scheduling.overlap import OverlapCost
from tests.router.scheduling.candidates import (
    ALMOST_ONE,
    Plain,
    Scripted,
    chi_square,
    costs_of,
    named,
    repeatable,
    situation,
)

tokens = st.integers(0, 200_000)
candidates_of = st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=6)


def fleet(figures: Sequence[tuple[int, int, int]], prompt: int) -> Plain:
    """From (pending prefill, active, cached) tokens each."""
    pending, active, cached = zip(*figures, strict=True)
    candidates = named(chr(ord("a") + n) for n in range(len(figures)))
    return situation(candidates, prompt, pending=pending, active=active, overlap=cached)


@pytest.mark.parametrize(
    ("weight", "prompt", "pending", "active", "credit", "cost"),
    [
        (1.0, 100, 0, 0, 0.0, 100.0),
        (1.0, 100, 0, 0, 96.0, 4.0),
        (1.0, 100, 50, 30, 96.0, 84.0),
        (2.0, 100, 50, 30, 60.0, 210.0),
        (0.5, 100, 50, 30, 36.0, 87.0),
        (0.0, 100, 50, 30, 96.0, 30.0),
        (1.0, 100, 0, 0, 500.0, 0.0),
        (1.0, 0, 7, 0, 0.0, 7.0),
    ],
)
def test_the_cost(weight: float, prompt: int, pending: int, active: int, credit: float, cost: float) -> None:
    one = situation(named("a"), prompt, pending=[pending], active=[active], credit=[credit])
    assert costs_of(Cheapest(OverlapCost(weight), 0).choose(one, Scripted([]))) == [cost]


@repeatable
@given(candidates_of, tokens, st.floats(0, 100), st.floats(0, ALMOST_ONE))
def test_at_temperature_zero_the_least_cost_wins(
    figures: list[tuple[int, int, int]], prompt: int, weight: float, number: float
) -> None:
    choice = Cheapest(OverlapCost(weight), 0).choose(fleet(figures, prompt), Scripted([number]))
    expected = [weight * (pending + max(prompt - cached, 0)) + active for pending, active, cached in figures]
    assert costs_of(choice) == pytest.approx(expected)
    assert expected[choice.position] == pytest.approx(min(expected))


@repeatable
@given(candidates_of, tokens, st.floats(0, ALMOST_ONE))
def test_weight_zero_is_pure_load_balancing(figures: list[tuple[int, int, int]], prompt: int, number: float) -> None:
    choice = Cheapest(OverlapCost(0), 0).choose(fleet(figures, prompt), Scripted([number]))
    assert figures[choice.position][1] == min(active for _, active, _ in figures)


def test_ties_at_temperature_zero_are_broken_at_random() -> None:
    source = random.Random(5)
    figures = [(0, 10, 0), (10, 0, 0), (0, 0, 0), (5, 0, 15)]
    two = fleet(figures[:2], 100)
    seen = Counter(Cheapest(OverlapCost(1), 0).choose(two, source).position for _ in range(4000))
    assert chi_square([seen[0], seen[1]], [0.5, 0.5]) < 35
    assert Cheapest(OverlapCost(1), 0).choose(fleet(figures, 100), source).position == 3


PROMPT = 100
FIGURES = [(0, 20, 60), (0, 0, 0), (0, 35, 40), (10, 140, 0)]
COSTS = [60, 100, 95, 250]


def shares(costs: Sequence[float], temperature: float, prompt: int) -> list[float]:
    """p ∝ exp(−(cost − min) / (T · prompt tokens))."""
    weights = [math.exp(-(cost - min(costs)) / (temperature * prompt)) for cost in costs]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 20.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    policy, candidates, source = Cheapest(OverlapCost(1), temperature), fleet(FIGURES, PROMPT), random.Random(6)
    seen = Counter(policy.choose(candidates, source).position for _ in range(20_000))
    expected = shares(COSTS, temperature, PROMPT)
    likely = [n for n, share in enumerate(expected) if share * 20_000 >= 5]
    rest = 1 - sum(expected[n] for n in likely)
    assert chi_square([seen[n] for n in likely], [expected[n] / (1 - rest) for n in likely]) < 35
    assert all(seen[n] < 10 for n in range(4) if n not in likely)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 20.0])
def test_each_candidate_owns_its_share_of_the_random_numbers(temperature: float) -> None:
    policy, candidates = Cheapest(OverlapCost(1), temperature), fleet(FIGURES, PROMPT)
    edges = [0.0, *itertools.accumulate(shares(COSTS, temperature, PROMPT))]
    for n, (low, high) in enumerate(itertools.pairwise(edges)):
        margin = (high - low) / 1000
        if margin < 1e-12:
            continue
        for number in (low + margin, (low + high) / 2, high - margin):
            choice = policy.choose(candidates, Scripted([number]))
            assert choice.position == n
            assert choice.reason == f"sampled at temperature {temperature:g}"
            assert costs_of(choice) == COSTS


def test_the_temperature_is_in_units_of_the_prompt() -> None:
    """One whole prompt more costs a factor of e, however long the prompt is."""
    for prompt in (10, 1000, 100_000):
        candidates = fleet([(0, 0, 0), (prompt, 0, 0)], prompt)
        edge = 1 / (1 + math.exp(-1))
        policy = Cheapest(OverlapCost(1), 1)
        assert policy.choose(candidates, Scripted([edge - 1e-9])).position == 0
        assert policy.choose(candidates, Scripted([edge + 1e-9])).position == 1


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@repeatable
@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=6), positive, st.floats(0, ALMOST_ONE))
def test_extreme_costs_and_scales_neither_overflow_nor_leave_the_range(
    costs: list[float], scale: float, number: float
) -> None:
    position = sample_softmax(np.array(costs), scale, Scripted([number]))
    assert math.exp(-(costs[position] - min(costs)) / scale) > 0 or costs[position] == min(costs)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # costs of infinity
@repeatable
@given(candidates_of, tokens, st.floats(0, 1e308), positive, st.floats(0, ALMOST_ONE))
def test_extreme_settings_still_choose(
    figures: list[tuple[int, int, int]], prompt: int, weight: float, temperature: float, number: float
) -> None:
    choice = Cheapest(OverlapCost(weight), temperature).choose(fleet(figures, prompt), Scripted([number] * 2))
    assert 0 <= choice.position < len(figures)


def test_a_tiny_temperature_takes_the_least_and_a_huge_one_anything() -> None:
    source, candidates = random.Random(7), fleet(FIGURES, PROMPT)
    assert {Cheapest(OverlapCost(1), 1e-300).choose(candidates, source).position for _ in range(100)} == {0}
    seen = Counter(Cheapest(OverlapCost(1), 1e300).choose(candidates, source).position for _ in range(8000))
    assert chi_square([seen[n] for n in range(4)], [0.25] * 4) < 35


@repeatable
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=5), st.floats(0.05, 2), st.floats(0, 0.999))
def test_adding_the_same_to_every_cost_changes_nothing(costs: list[int], scale: float, number: float) -> None:
    weights = list(itertools.accumulate(math.exp(-(cost - min(costs)) / (1000 * scale)) for cost in costs))
    assume(all(abs(number - weight / weights[-1]) > 1e-9 for weight in weights))
    plain, shifted = (np.array(costs) + more for more in (0.0, 10_000.0))
    assert sample_softmax(plain, 1000 * scale, Scripted([number])) == sample_softmax(
        shifted, 1000 * scale, Scripted([number])
    )
