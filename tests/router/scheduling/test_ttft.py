"""Algorithm 1 of the Mooncake paper without its transfers, by hand."""

from __future__ import annotations

import pytest

from router.scheduling.cheapest import Cheapest
from router.scheduling.ttft import PredictedTTFT
from tests.router.scheduling.candidates import Scripted, costs_of, named, situation


@pytest.mark.parametrize(
    ("queue", "prefill", "step", "expected", "taken"),
    [
        # T_queue + T_prefill, which is less the more of the prompt is held.
        ([0.5, 0.1, 0.0], [0.1, 0.4, 0.8], [0, 0, 0], [0.6, 0.5, 0.8], 1),
        ([0.2, 0.1, 0.0], [0.1, 0.4, 0.8], [0, 0, 0], [0.3, 0.5, 0.8], 0),
        ([0.9, 0.5, 0.0], [0.1, 0.4, 0.8], [0, 0, 0], [1.0, 0.9, 0.8], 2),
        # The first token comes with a step that decodes as well.
        ([0.0, 0.0, 0.0], [0.4, 0.4, 0.4], [0.03, 0.02, 0.05], [0.43, 0.42, 0.45], 1),
    ],
)
def test_the_least_predicted_time_to_first_token_is_taken(
    queue: list[float], prefill: list[float], step: list[float], expected: list[float], taken: int
) -> None:
    three = situation(named("abc"), 1000, queue=queue, prefill=prefill, whole=[0.8] * 3, step=step)
    choice = Cheapest(PredictedTTFT()).choose(three, Scripted([]))
    assert costs_of(choice) == pytest.approx(expected)
    assert choice.position == taken
    assert not choice.hold


def test_a_whole_prompt_is_meant_at_the_mean_of_all() -> None:
    cost = PredictedTTFT().cost(situation(named("ab"), 1000, prefill=[0.1, 0.2], whole=[0.5, 1.5]))
    assert cost.prompt == 1.0
