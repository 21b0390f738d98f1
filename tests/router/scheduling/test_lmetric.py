"""(Pending + new prefill tokens) × batch size, by hand."""

from __future__ import annotations

import pytest

from router.scheduling.cheapest import Cheapest
from router.scheduling.lmetric import LMetric
from tests.router.scheduling.candidates import Scripted, costs_of, named, situation


@pytest.mark.parametrize(
    ("prompt", "pending", "requests", "credit", "costs", "taken"),
    [
        (1000, [0, 0, 0], [0, 0, 0], [0, 0, 0], [1000, 1000, 1000], None),
        (1000, [0, 0, 0], [3, 0, 1], [900, 0, 600], [100 * 4, 1000, 400 * 2], 0),
        (1000, [0, 0, 0], [10, 0, 1], [900, 0, 600], [100 * 11, 1000, 400 * 2], 2),
        (1000, [5000, 0, 0], [2, 2, 2], [900, 0, 0], [5100 * 3, 1000 * 3, 1000 * 3], None),
        # Nothing to compute costs a token, else the batch would not count.
        (96, [0, 0, 0], [7, 0, 3], [96, 96, 96], [8, 1, 4], 1),
        (0, [0, 0, 0], [1, 0, 1], [0, 0, 0], [2, 1, 2], 1),
    ],
)
def test_the_cost(
    prompt: int, pending: list[int], requests: list[int], credit: list[float], costs: list[float], taken: int | None
) -> None:
    three = situation(named("abc"), prompt, pending=pending, requests=requests, credit=credit)
    choice = Cheapest(LMetric()).choose(three, Scripted([0.0]))
    assert costs_of(choice) == costs
    assert taken is None or choice.position == taken
    assert not choice.hold


def test_a_whole_prompt_is_meant_at_the_mean_batch() -> None:
    assert LMetric().cost(situation(named("ab"), 100, requests=[0, 4])).prompt == 100 * 3
    assert LMetric().cost(situation(named("ab"), 0)).prompt > 0
