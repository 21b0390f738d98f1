"""From what candidates cost to who is taken, now or later."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Cost, Situation
from tests.router.scheduling.candidates import Scripted, costs_of, named, situation

THREE = situation(named("abc"))


class Fixed:
    def __init__(self, values: Sequence[float], prompt: float = 1.0, is_open: Sequence[bool] | None = None) -> None:
        self._cost = Cost(np.array(values), prompt, None if is_open is None else np.array(is_open))

    def cost(self, situation: Situation) -> Cost:
        return self._cost


def test_the_least_is_taken_and_what_each_would_have_cost_is_told() -> None:
    choice = Cheapest(Fixed([3.0, 1.0, 2.0])).choose(THREE, Scripted([]))
    assert (choice.position, choice.hold) == (1, False)
    assert costs_of(choice) == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("is_open", "holds"),
    [([True, True, True], False), ([False, True, False], False), ([True, False, True], True), (None, False)],
)
def test_only_whether_the_best_is_open_counts(is_open: list[bool] | None, holds: bool) -> None:
    choice = Cheapest(Fixed([3.0, 1.0, 2.0], is_open=is_open)).choose(THREE, Scripted([]))
    assert (choice.position, choice.hold) == (1, holds)


@pytest.mark.parametrize(("number", "position"), [(0.0, 0), (0.999, 1)])
def test_one_that_was_drawn_is_held_if_it_is_not_open(number: float, position: int) -> None:
    policy = Cheapest(Fixed([1.0, 1.0], is_open=[True, False]), temperature=1.0)
    choice = policy.choose(situation(named("ab")), Scripted([number]))
    assert (choice.position, choice.hold) == (position, position == 1)
    assert choice.reason == "sampled at temperature 1"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cost_that_is_no_number_or_infinite_is_not_the_least(temperature: float) -> None:
    """A policy may divide by what is 0 for some candidate."""
    nan, inf = math.nan, math.inf
    for values, position in (([nan, 1e4, 1.0], 2), ([nan, nan, 1.0], 2), ([1.0, nan, inf], 0), ([inf, nan, 1.0], 2)):
        for number in (0.0, 0.999):
            assert Cheapest(Fixed(values), temperature).choose(THREE, Scripted([number])).position == position
    for values in ([inf, inf, inf], [nan, nan, nan]):
        choices = {
            Cheapest(Fixed(values), 1.0).choose(THREE, Scripted([number])).position for number in (0.0, 0.5, 0.9)
        }
        assert choices == {0, 1, 2}
    assert Cheapest(Fixed([nan, nan, nan])).choose(THREE, Scripted([])).position in range(3)


@pytest.mark.parametrize("prompt", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_whole_prompt_more_is_that_much_less_likely_in_any_unit(prompt: float, temperature: float) -> None:
    policy = Cheapest(Fixed([0.0, prompt], prompt), temperature)
    edge = 1 / (1 + math.exp(-1 / temperature))
    for number, position in ((edge - 1e-9, 0), (edge + 1e-9, 1)):
        assert policy.choose(situation(named("ab")), Scripted([number])).position == position


def test_without_a_prompt_the_least_is_taken_at_any_temperature() -> None:
    """Of a request that is routed by load only, the policy of docs/policies.md says so."""
    choice = Cheapest(Fixed([3.0, 1.0, 2.0], prompt=0), temperature=1.0).choose(THREE, Scripted([]))
    assert choice.position == 1
