"""What lies in a shared store: credited to whom it helps, loaded and not computed, and given back however it ends."""

from __future__ import annotations

import random

import numpy as np
import pytest

from indexer.matches import MostOfMatches, Overlap
from indexer.types import WorkerRank
from router.scheduling.auto import Auto
from router.scheduling.candidates import Candidates
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import CostPolicy
from router.scheduling.latency import Prefill
from router.scheduling.load import Load, LoadBook
from router.scheduling.overlap import OverlapCost
from router.scheduling.present import Present
from router.scheduling.scheduler import Scheduler
from router.scheduling.ttft import PredictedTTFT
from tests.router.scheduling.candidates import holding, named, rank
from tests.router.scheduling.endings import ENDINGS, Ending, end

A, B = rank("a"), rank("b")
POLICIES = [Auto, PredictedTTFT, lambda: OverlapCost(1.0)]


def scheduler(candidates: Candidates, policy: CostPolicy | None = None) -> Scheduler:
    choosing = Scheduler(Cheapest(policy or Auto()), LoadBook(), random.Random(0))
    for each in candidates.ranks:
        choosing.watch(each, 16)
    return choosing


@pytest.mark.parametrize("policy", POLICIES)
def test_a_busy_holder_is_passed_over_when_another_can_load(policy: type[CostPolicy]) -> None:
    candidates, prompt = named("ab"), 8_000
    choosing = scheduler(candidates, policy())
    held = holding({A: Overlap(400, 400)})
    choosing.reserve(choosing.select(named("a"), 3_000, holding({}), 0.0), 0.0)
    assert choosing.select(candidates, prompt, held, 0.0).rank == A
    found = choosing.select(candidates, prompt, held, 0.0, stored=6_400)
    assert found.rank == B
    assert (found.overlap_tokens, found.stored_tokens, found.prefill_tokens) == (0, 6_400, 1_600)


def test_what_a_rank_holds_itself_is_not_loaded() -> None:
    candidates = named("a")
    found = scheduler(candidates).select(candidates, 1_000, holding({A: Overlap(10, 10)}), 0.0, stored=320)
    assert (found.overlap_tokens, found.stored_tokens, found.prefill_tokens) == (160, 160, 680)
    found = scheduler(candidates).select(candidates, 1_000, holding({A: Overlap(40, 40)}), 0.0, stored=320)
    assert (found.overlap_tokens, found.stored_tokens) == (640, 0)


def test_the_last_token_is_always_computed() -> None:
    candidates = named("a")
    found = scheduler(candidates).select(candidates, 64, holding({}), 0.0, stored=64)
    assert (found.stored_tokens, found.prefill_tokens) == (48, 16)


@pytest.mark.parametrize(("without", "chosen"), [(A, B), (B, A)])
def test_ranks_without_the_store_are_not_credited(without: WorkerRank, chosen: WorkerRank) -> None:
    candidates = Candidates([(A, 16), (B, 16)], without_store=[without])
    found = scheduler(candidates).select(candidates, 8_000, holding({}), 0.0, stored=6_400)
    assert (found.rank, found.stored_tokens) == (chosen, 6_400)


def test_a_prompt_joins_the_line_when_what_is_stored_of_it_should_be_there() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    decision = choosing.select(candidates, 100_000, holding({}), 0.0, stored=99_000)
    assert decision.predicted
    loaded = decision.predicted.load
    choosing.reserve(decision, 0.0)
    left = [choosing.backlog.seconds(candidates, np.ones(1), loaded * part).item() for part in (0.0, 0.99, 1.001)]
    assert left[:2] == [0.0, 0.0]
    assert left[2] > 0.0


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_loaded_is_booked_until_it_is_there(ending: Ending, streamed: bool) -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    decision = choosing.select(candidates, 1_000, holding({}), 0.0, stored=320)
    booking = choosing.reserve(decision, 0.0, streamed)
    assert choosing.store_loads.tokens == {A: 320}
    assert choosing.book.load(A, 0.0) == Load(1, 680, 1_000)
    end(booking, ending, 1.0)
    assert not choosing.store_loads.tokens
    booking.release(2.0)
    assert choosing.book.load(A, 2.0) == Load()


def test_nothing_stays_booked_of_a_rank_that_has_gone() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    booking = choosing.reserve(choosing.select(candidates, 1_000, holding({}), 0.0, stored=320), 0.0)
    choosing.latency.observe_prefill(A, Prefill(1_000, 1_000), 9.0, 0.0)
    choosing.forget(A)
    choosing.watch(A, 16)
    assert choosing.book.load(A, 0.0) == Load()
    assert choosing.store_loads.wait_seconds(candidates, 0.0) == 0.0
    assert choosing.latency.seconds_on(A, 1.0) == 1.0
    booking.first_token(1.0)
    assert not choosing.store_loads.tokens


def test_what_is_being_loaded_is_not_there_yet() -> None:
    """Whoever comes meanwhile would load it again, after the first."""
    candidates = named("ab")
    held = MostOfMatches(holding({}), [holding({A: Overlap(400, 400), B: Overlap(10, 10)})])  # all of it is predicted
    choosing = scheduler(candidates)
    first = choosing.reserve(choosing.select(named("a"), 8_000, holding({}), 0.0, stored=6_400), 0.0)

    def overlaps(stored: int) -> list[int]:
        present = Present(choosing, candidates, 8_000, held, 0.0, stored=stored)
        assert (present.credit_tokens >= present.overlap_tokens).all()
        return list(present.overlap_tokens.tolist())

    assert overlaps(6_400) == [0, 160]
    assert overlaps(0) == [6_400, 160], "it is not known to be in the store: then it is being computed"
    first.first_token(1.0)
    assert overlaps(6_400) == [6_400, 160]


def test_a_rank_that_loads_computes_others_meanwhile() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    choosing.reserve(choosing.select(candidates, 100_000, holding({}), 0.0, stored=99_000), 0.0)
    now = choosing.store_loads.wait_seconds(candidates, 0.0)[0] / 2
    assert now > 0
    behind = choosing.select(candidates, 100, holding({}), now).predicted
    assert behind
    assert (behind.queue, behind.load) == (0, 0)


def test_loads_hold_up_nobody_who_takes_nothing_from_the_store() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    choosing.reserve(choosing.select(candidates, 100_000, holding({}), 0.0, stored=99_000), 0.0)
    whole = holding({A: Overlap(100, 100)})
    found = choosing.select(candidates, 1_600, whole, 0.0, stored=320)
    assert found.stored_tokens == 0
    assert found.predicted
    assert found.predicted.load == 0


def test_loads_that_come_before_delay_the_next() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    alone = choosing.select(candidates, 100_000, holding({}), 0.0, stored=80_000).predicted
    choosing.reserve(choosing.select(candidates, 100_000, holding({}), 0.0, stored=80_000), 0.0)
    second = choosing.select(candidates, 100_000, holding({}), 0.0, stored=80_000).predicted
    assert alone
    assert second
    assert second.load > 1.8 * alone.load


def test_how_long_loading_takes_is_learned_and_prefill_is_not_blamed() -> None:
    candidates = named("a")
    choosing = scheduler(candidates)
    before = choosing.latency.prefill_work(Prefill(680, 1_000))
    now = 0.0
    for _ in range(30):
        decision = choosing.select(candidates, 1_000, holding({}), now, stored=320)
        booking = choosing.reserve(decision, now)
        now += 5.0
        booking.first_token(now)
        booking.release(now)
    predicted = choosing.select(candidates, 1_000, holding({}), now, stored=320).predicted
    assert predicted
    assert predicted.load == pytest.approx(5.0, rel=0.3)
    assert choosing.latency.prefill_work(Prefill(680, 1_000)) == before
