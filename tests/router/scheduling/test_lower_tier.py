"""What a rank holds below its GPU: loaded, not computed; in KV memory that must be free; at a speed that is learned."""

from __future__ import annotations

import random
from typing import Any

import pytest

from indexer.matches import Overlap
from router.scheduling.auto import Auto
from router.scheduling.candidates import Candidates
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import CostPolicy, Decision
from router.scheduling.latency import Prefill
from router.scheduling.load import Load, LoadBook
from router.scheduling.present import Present
from router.scheduling.scheduler import Scheduler
from router.scheduling.ttft import PredictedTTFT
from tests.router.scheduling.candidates import holding, named, rank, situation
from tests.router.scheduling.endings import ENDINGS, Ending, end

A, B, C = rank("a"), rank("b"), rank("c")
PROMPT = 8_000
LOWER = Overlap(490, 10)
"""All of the prompt but 160 tokens; of that 160 on the GPU."""


def scheduler(candidates: Candidates, policy: CostPolicy | None = None) -> Scheduler:
    choosing = Scheduler(Cheapest(policy or Auto()), LoadBook(), random.Random(0))
    for each in candidates.ranks:
        choosing.watch(each, 16)
    return choosing


def decide(choosing: Scheduler, overlap: Overlap = LOWER, now: float = 0.0, on_disk: int = 0) -> Decision:
    return choosing.select(named("a"), PROMPT, holding({A: overlap}, on_disk), now)


def test_what_is_loaded_is_not_computed_but_needs_memory() -> None:
    decision = decide(scheduler(named("a")))
    assert (decision.overlap_tokens, decision.lower_tokens) == (7_840, 7_680)
    assert (decision.prefill_tokens, decision.new_tokens) == (160, 7_840)
    assert decide(scheduler(named("a")), Overlap(490, 490)).new_tokens == 160


@pytest.mark.parametrize("capacity", [16_000, 15_000])
def test_room_is_waited_for(capacity: int) -> None:
    """7,000 tokens are in use."""
    held: dict[str, Any] = {
        "overlap": [7_000],
        "requests": [3],
        "memory": [7_000],
        "capacity": [capacity],
        "queue": [0.0],
    }
    on_gpu, below = (Auto().cost(situation(named("a"), PROMPT, **held, lower=[lower])) for lower in (0, 7_000))
    assert on_gpu.open is not None
    assert below.open is not None
    assert (bool(on_gpu.open[0]), bool(below.open[0])) == (True, capacity == 16_000)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_load_is_booked_until_it_is_there(ending: Ending) -> None:
    choosing = scheduler(named("a"))
    booking = choosing.reserve(decide(choosing), 0.0)
    assert choosing.cpu_loads.tokens == {A: 7_680}
    behind = decide(choosing).predicted
    assert behind
    assert behind.load > 1.9 * choosing.cpu_loads.own_seconds(decide(choosing).candidates.block_sizes * 480, 0.0).item()
    end(booking, ending, 1.0)
    assert not choosing.cpu_loads.tokens
    booking.release(2.0)
    assert choosing.book.load(A, 2.0) == Load()


def test_loads_from_a_store_come_on_top() -> None:
    choosing, held = scheduler(named("a")), holding({A: Overlap(300, 100)})
    own, both = (Present(choosing, named("a"), PROMPT, held, 0.0, stored=stored) for stored in (0, 6_400))
    assert (own.lower_tokens[0], both.stored_tokens[0]) == (3_200, 1_600)
    for seconds in ("own_load_seconds", "load_seconds"):
        assert getattr(both, seconds)[0] == pytest.approx(
            getattr(own, seconds)[0] + choosing.store_loads.own_seconds(both.stored_tokens, 0.0)[0]
        )


def test_who_loads_counts_as_loading() -> None:
    choosing = scheduler(named("ab"))
    booking = choosing.reserve(decide(choosing), 0.0)
    loading = [Present(choosing, named("ab"), PROMPT, holding({}), now).loading for now in (0.0, 0.001)]
    assert loading == [0.5, 0.5]
    booking.release(0.002)
    assert Present(choosing, named("ab"), PROMPT, holding({}), 0.002).loading == 0.0


def test_nothing_stays_booked_of_a_rank_that_has_gone() -> None:
    choosing = scheduler(named("a"))
    booking = choosing.reserve(decide(choosing), 0.0)
    choosing.forget(A)
    booking.first_token(1.0)
    assert not choosing.cpu_loads.tokens


def answers(choosing: Scheduler, overlap: Overlap, seconds: float, times: int = 20, on_disk: int = 0) -> None:
    """One after the other."""
    for number in range(times):
        now = 10.0 * number
        booking = choosing.reserve(decide(choosing, overlap, now, on_disk), now)
        booking.first_token(now + seconds)
        booking.release(now + seconds)


@pytest.mark.parametrize("seconds", [0.04, 0.4, 2.0])
def test_its_speed_is_learned_and_not_taken_for_the_ranks(seconds: float) -> None:
    choosing = scheduler(named("a"))
    before = choosing.latency.prefill_seconds_on(A, Prefill(1_000, 1_000))
    answers(choosing, LOWER, seconds)
    predicted = decide(choosing, now=200.0).predicted
    assert predicted
    assert predicted.queue + predicted.load + predicted.prefill == pytest.approx(seconds, rel=0.05)
    assert choosing.latency.prefill_seconds_on(A, Prefill(1_000, 1_000)) == before


def test_a_few_loaded_tokens_do_not_hide_how_fast_a_rank_computes() -> None:
    choosing = scheduler(named("a"))
    before = choosing.latency.prefill_seconds_on(A, Prefill(1_000, 1_000))
    answers(choosing, Overlap(60, 0), 3.0)
    assert choosing.latency.prefill_seconds_on(A, Prefill(1_000, 1_000)) > 3 * before
    assert choosing.cpu_loads.speed.factor(200.0) == 1.0


def test_loads_from_disk_are_learned_apart() -> None:
    choosing = scheduler(named("a"))
    answers(choosing, LOWER, 0.1)
    answers(choosing, LOWER, 2.0, on_disk=480)
    for on_disk, seconds in ((0, 0.1), (480, 2.0), (240, 1.05)):
        predicted = decide(choosing, now=200.0, on_disk=on_disk).predicted
        assert predicted
        assert predicted.queue + predicted.load + predicted.prefill == pytest.approx(seconds, rel=0.06)


def test_of_loads_from_several_tiers_the_slowest_tells_of_itself_alone() -> None:
    choosing = scheduler(named("a"))
    answers(choosing, LOWER, 0.2)
    before = choosing.cpu_loads.speed.factor(200.0)
    answers(choosing, LOWER, 1.1, on_disk=240)
    assert choosing.cpu_loads.speed.factor(200.0) == before
    predicted = decide(choosing, now=200.0, on_disk=240).predicted
    assert predicted
    assert predicted.queue + predicted.load + predicted.prefill == pytest.approx(1.1, rel=0.05)


@pytest.mark.parametrize("ending", ENDINGS)
def test_loads_from_several_tiers_are_booked_until_they_are_there(ending: Ending) -> None:
    choosing = scheduler(named("a"))
    decision = choosing.select(named("a"), PROMPT, holding({A: Overlap(300, 100)}, 50), 0.0, stored=6_400)
    booking = choosing.reserve(decision, 0.0)
    assert [loads.tokens for loads in choosing.loads] == [{A: 1_600}, {A: 800}, {A: 2_400}]
    end(booking, ending, 1.0)
    assert not any(loads.tokens for loads in choosing.loads)


@pytest.mark.parametrize("policy", [Auto, PredictedTTFT])
@pytest.mark.parametrize(("seconds", "chosen"), [(0.05, B), (30.0, C)])
def test_slow_loads_are_avoided_and_quick_ones_are_not(
    policy: type[CostPolicy], seconds: float, chosen: object
) -> None:
    candidates = named("abc")
    choosing = scheduler(candidates, policy())
    answers(choosing, LOWER, seconds)
    held = holding({B: LOWER, C: Overlap(10, 10)})
    found = choosing.select(Candidates([(B, 16), (C, 16)]), PROMPT, held, 1_000.0)
    assert found.rank == chosen


@pytest.mark.parametrize("policy", [Auto, PredictedTTFT])
def test_one_slow_load_is_no_reason_to_avoid_loads_for_ever(policy: type[CostPolicy]) -> None:
    """The first load of an engine may take seconds. Nobody would load again who could show that others do not."""
    candidates = named("ab")
    choosing = scheduler(candidates, policy())
    held = holding({A: LOWER})
    answers(choosing, LOWER, 5.0, times=1)
    assert choosing.select(candidates, PROMPT, held, 60.0).rank == B
    assert choosing.select(candidates, PROMPT, held, 3_600.0).rank == A
