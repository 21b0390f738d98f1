"""Algorithm 1 of the Mooncake paper without its transfers, by hand."""

from __future__ import annotations

import pytest

from indexer.events import LoadReport
from router.scheduling.cheapest import Cheapest
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler
from router.scheduling.ttft import PredictedTTFT
from tests.router.scheduling.candidates import Scripted, costs_of, holding, named, rank, situation


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


def test_once_all_slots_are_taken_a_request_waits_until_one_is_free() -> None:
    """One of n requests ends every nth part of the time that they stay."""
    candidates = named("a")
    choosing = Scheduler(Cheapest(PredictedTTFT()), LoadBook(), Scripted([0.0] * 8))
    choosing.watch(rank("a"), 16)
    choosing.book.on_report(LoadReport("a", 0, 1, -1, True, request_total_slots=2), 0.0)
    waits = []
    for _ in range(4):
        decision = choosing.select(candidates, 10, holding({}), 0.0)
        assert decision.predicted
        waits.append(decision.predicted.queue)
        choosing.reserve(decision, 0.0).first_token(0.0)
    assert waits == pytest.approx([0.0, 0.0, choosing.latency.residence / 2, choosing.latency.residence * 2 / 3])
