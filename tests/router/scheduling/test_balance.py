"""Policies without a view of caches: fair, stable, and never the more loaded of two."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin, least_cost
from router.scheduling.candidates import Figures
from router.scheduling.decision import Policy, Uniform
from tests.router.scheduling.candidates import (
    ALMOST_ONE,
    Scripted,
    chi_square,
    costs_of,
    named,
    repeatable,
    situation,
    with_requests,
)

names = st.sets(st.sampled_from("abcdef"), min_size=1)


def turns(policy: RoundRobin, *fleets: str) -> str:
    """Who is chosen, call after call, when the candidates are the letters of each of `fleets`."""
    known = {fleet: named(fleet) for fleet in fleets}  # equal ones are the same object, as the fleet hands them out
    choices = [(known[fleet], policy.choose(situation(known[fleet]), random.Random(0))) for fleet in fleets]
    return "".join(candidates.ranks[choice.position].worker_id for candidates, choice in choices)


@pytest.mark.parametrize(
    ("fleets", "chosen"),
    [
        (["abc"] * 7, "abcabca"),
        (["cab"] * 3 + ["bca"], "abca"),
        (["abc", "abc", "ab", "ab", "abc"], "ababc"),
        (["ac", "ac", "abc", "abc", "abc", "abc"], "acbacb"),
        (["abc", "bc", "abc", "abc"], "abca"),
        (["a", "a"], "aa"),
        # A model that only c serves must not cost b its turns.
        (["ab", "c"] * 3, "acbcac"),
        (["ab", "bc", "ac"] * 2, "abcabc"),
    ],
)
def test_round_robin_goes_to_who_waited_longest(fleets: list[str], chosen: str) -> None:
    assert turns(RoundRobin(), *fleets) == chosen


@repeatable
@given(st.lists(names, max_size=60))
def test_round_robin_is_fair_to_each_whoever_comes_and_goes(fleets: list[set[str]]) -> None:
    """While one waits for its turn, nobody is preferred to it twice."""
    order = ["".join(sorted(fleet)) for fleet in fleets]
    chosen = turns(RoundRobin(), *order)
    for waiting in "abcdef":
        preferred: Counter[str] = Counter()
        for fleet, name in zip(order, chosen, strict=True):
            if name == waiting:
                preferred.clear()
            elif waiting in fleet:
                preferred[name] += 1
                assert preferred[name] < 2


def test_round_robin_forgets_whose_turn_was_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would remember all that ever joined and left."""
    monkeypatch.setattr("router.scheduling.balance._MOST_TURNS", 4)
    policy = RoundRobin()
    for number in range(100):
        policy.choose(situation(named([f"w{number:03}"])), random.Random(0))
        assert len(policy._turns) <= 5
    both = named(["w099", "w000"])
    assert both.ranks[policy.choose(situation(both), random.Random(0)).position].worker_id == "w000"


def test_round_robin_of_equal_fleets_is_exactly_even() -> None:
    chosen = Counter(turns(RoundRobin(), *["abcd"] * 400))
    assert set(chosen.values()) == {100}


def test_round_robin_knows_ranks_again_in_other_sets_of_them() -> None:
    """More sets than are remembered at a time, and equal ones that are not the same object."""
    policy = RoundRobin()
    assert "".join(turns(policy, "abc") for _ in range(200)) == ("abc" * 67)[:200]


def test_round_robin_takes_the_newcomers_of_a_fleet_that_grows() -> None:
    policy = RoundRobin()
    fleets = [named(f"{n:03}" for n in range(size)) for size in range(1, 60)]
    chosen = [policy.choose(situation(fleet), random.Random(0)).position for fleet in fleets]
    assert chosen == list(range(59))


@pytest.mark.parametrize(
    "policy", [RoundRobin(), Random(), LeastLoaded(), PowerOfTwo()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE])
def test_a_single_candidate_is_taken(policy: Policy, number: float) -> None:
    choice = policy.choose(with_requests([7]), Scripted([number] * 2))
    assert choice.position == 0
    assert choice.reason


@pytest.mark.parametrize("size", [2, 3, 5, 7, 1000])
@pytest.mark.parametrize("policy", [Random(), LeastLoaded(), PowerOfTwo()], ids=lambda p: type(p).__name__)
def test_the_greatest_random_number_stays_inside(policy: Policy, size: int) -> None:
    assert 0 <= policy.choose(with_requests([0] * size), Scripted([ALMOST_ONE] * 2)).position < size


def test_random_is_even() -> None:
    source = random.Random(1)
    seen = Counter(Random().choose(with_requests([0, 50, 9]), source).position for _ in range(6000))
    assert chi_square([seen[n] for n in range(3)], [1 / 3] * 3) < 35


class Drawn:
    """Counts of requests that remember which of them were looked at."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self.positions: set[int] = set()

    def __getitem__(self, position: int) -> int:
        self.positions.add(position)
        return self._counts[position]


def draw_two(counts: Sequence[int], source: Uniform) -> tuple[int, set[int]]:
    """(who was chosen, who was drawn)"""
    drawn = Drawn(counts)
    choice = PowerOfTwo().choose(dataclasses.replace(with_requests(counts), requests=cast("Figures", drawn)), source)
    assert choice.costs is None
    return choice.position, drawn.positions


@repeatable
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.floats(0, ALMOST_ONE), st.floats(0, ALMOST_ONE))
def test_power_of_two_never_takes_the_more_loaded_of_its_two(counts: list[int], one: float, other: float) -> None:
    chosen, drawn = draw_two(counts, Scripted([one, other]))
    assert len(drawn) == min(2, len(counts))
    assert chosen in drawn
    assert counts[chosen] == min(counts[position] for position in drawn)


def test_power_of_two_draws_every_pair_equally() -> None:
    source, pairs = random.Random(2), Counter[tuple[int, ...]]()
    for _ in range(6000):
        pairs[tuple(sorted(draw_two([0, 0, 0, 0], source)[1]))] += 1
    assert set(pairs) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    assert chi_square(list(pairs.values()), [1 / 6] * 6) < 35


def test_power_of_two_takes_the_most_loaded_never_and_the_least_most_often() -> None:
    source = random.Random(3)
    seen = Counter(PowerOfTwo().choose(with_requests([2, 0, 1]), source).position for _ in range(3000))
    assert seen[0] == 0
    assert chi_square([seen[1], seen[2]], [2 / 3, 1 / 3]) < 35


def test_least_loaded_takes_the_fewest_requests_and_says_what_all_have() -> None:
    choice = LeastLoaded().choose(with_requests([3, 1, 2]), Scripted([]))
    assert choice.position == 1
    assert costs_of(choice) == [3, 1, 2]
    assert choice.reason == "least cost"


def test_least_loaded_breaks_ties_at_random() -> None:
    source = random.Random(4)
    loads = with_requests([1, 5, 1, 1, 9])
    seen = Counter(LeastLoaded().choose(loads, source).position for _ in range(6000))
    assert set(seen) == {0, 2, 3}
    assert chi_square(list(seen.values()), [1 / 3] * 3) < 35
    assert LeastLoaded().choose(loads, source).reason == "least cost, one of 3 ties"


@pytest.mark.parametrize("policy", [RoundRobin(), Random(), PowerOfTwo()], ids=lambda p: type(p).__name__)
def test_what_nothing_was_added_up_for_has_no_costs(policy: Policy) -> None:
    assert policy.choose(with_requests([1, 2]), Scripted([0.5, 0.5])).costs is None


@repeatable
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=8), st.floats(0, ALMOST_ONE))
def test_the_least_cost_is_least(costs: list[float], number: float) -> None:
    choice = least_cost(np.array(costs), Scripted([number]))
    assert costs[choice.position] == min(costs)
    assert costs_of(choice) == costs
