"""Policies without a view of caches: fair, stable, and never the more loaded of two."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin, least_cost
from router.scheduling.decision import Policy
from tests.router.scheduling.candidates import (
    ALMOST_ONE,
    Scripted,
    candidate,
    chi_square,
    rank,
    repeatable,
    with_requests,
)

names = st.sets(st.sampled_from("abcdef"), min_size=1)


def turns(policy: RoundRobin, *fleets: str) -> str:
    """Who is chosen, call after call, when the candidates are the letters of each of `fleets`."""
    chosen = []
    for fleet in fleets:
        candidates = [candidate(name) for name in fleet]
        chosen.append(candidates[policy.choose(candidates, 0, random.Random(0)).position].rank.worker_id)
    return "".join(chosen)


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


def test_round_robin_of_equal_fleets_is_exactly_even() -> None:
    chosen = Counter(turns(RoundRobin(), *["abcd"] * 400))
    assert set(chosen.values()) == {100}


@pytest.mark.parametrize(
    "policy", [RoundRobin(), Random(), LeastLoaded(), PowerOfTwo()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE])
def test_a_single_candidate_is_taken(policy: Policy, number: float) -> None:
    choice = policy.choose(with_requests([7]), 10, Scripted([number] * 2))
    assert choice.position == 0
    assert choice.reason


@pytest.mark.parametrize("size", [2, 3, 5, 7, 1000])
@pytest.mark.parametrize("policy", [Random(), LeastLoaded(), PowerOfTwo()], ids=lambda p: type(p).__name__)
def test_the_greatest_random_number_stays_inside(policy: Policy, size: int) -> None:
    assert 0 <= policy.choose([candidate(str(n)) for n in range(size)], 10, Scripted([ALMOST_ONE] * 2)).position < size


def test_random_is_even() -> None:
    source = random.Random(1)
    seen = Counter(Random().choose(with_requests([0, 50, 9]), 10, source).position for _ in range(6000))
    assert chi_square([seen[n] for n in range(3)], [1 / 3] * 3) < 35


@repeatable
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.floats(0, ALMOST_ONE), st.floats(0, ALMOST_ONE))
def test_power_of_two_never_takes_the_more_loaded_of_its_two(counts: list[int], one: float, other: float) -> None:
    choice = PowerOfTwo().choose(with_requests(counts), 10, Scripted([one, other]))
    assert len(choice.costs) == min(2, len(counts))
    chosen = rank(chr(ord("a") + choice.position))
    assert choice.costs[chosen] == counts[choice.position] == min(choice.costs.values())


def test_power_of_two_draws_every_pair_equally() -> None:
    source, pairs = random.Random(2), Counter[str]()
    for _ in range(6000):
        costs = PowerOfTwo().choose(with_requests([0, 0, 0, 0]), 10, source).costs
        pairs["".join(sorted(drawn.worker_id for drawn in costs))] += 1
    assert set(pairs) == {"ab", "ac", "ad", "bc", "bd", "cd"}
    assert chi_square(list(pairs.values()), [1 / 6] * 6) < 35


def test_power_of_two_takes_the_most_loaded_never_and_the_least_most_often() -> None:
    source = random.Random(3)
    seen = Counter(PowerOfTwo().choose(with_requests([2, 0, 1]), 10, source).position for _ in range(3000))
    assert seen[0] == 0
    assert chi_square([seen[1], seen[2]], [2 / 3, 1 / 3]) < 35


def test_least_loaded_takes_the_fewest_requests_and_says_what_all_have() -> None:
    choice = LeastLoaded().choose(with_requests([3, 1, 2]), 10, Scripted([]))
    assert choice.position == 1
    assert choice.costs == {rank("a"): 3, rank("b"): 1, rank("c"): 2}
    assert choice.reason == "least cost"


def test_least_loaded_breaks_ties_at_random() -> None:
    source = random.Random(4)
    candidates = with_requests([1, 5, 1, 1, 9])
    seen = Counter(LeastLoaded().choose(candidates, 10, source).position for _ in range(6000))
    assert set(seen) == {0, 2, 3}
    assert chi_square(list(seen.values()), [1 / 3] * 3) < 35
    assert LeastLoaded().choose(candidates, 10, source).reason == "least cost, one of 3 ties"


@repeatable
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=8), st.floats(0, ALMOST_ONE))
def test_the_least_cost_is_least(costs: list[float], number: float) -> None:
    choice = least_cost(with_requests([0] * len(costs)), costs, Scripted([number]))
    assert costs[choice.position] == min(costs)
    assert list(choice.costs.values()) == costs
