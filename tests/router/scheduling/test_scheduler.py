"""Selecting explains itself and changes nothing; reserving is seen at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.events import LoadReport
from indexer.prefix_index import Overlap
from indexer.types import WorkerRank
from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.scheduling.decision import Candidate, Choice, Decision, Policy, Uniform
from router.scheduling.load import Load, LoadBook
from router.scheduling.overlap import OverlapCost
from router.scheduling.scheduler import Scheduler
from tests.router.scheduling.candidates import Scripted, rank, repeatable

A, B, C = rank("a"), rank("b"), rank("c")


class Watching:
    """A policy that takes the first and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: Sequence[Candidate] = ()

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:
        self.shown = candidates
        return Choice(0, {}, "first")


def book_of(*ranks: tuple[WorkerRank, int]) -> LoadBook:
    book = LoadBook()
    for each, size in ranks:
        book.watch(each, size)
    return book


def scheduler(policy: Policy, *ranks: tuple[WorkerRank, int], seed: int = 0) -> Scheduler:
    return Scheduler(policy, book_of(*ranks), random.Random(seed))


def shown(size: int, prompt: int, overlap: Overlap) -> Candidate:
    policy = Watching()
    Scheduler(policy, book_of((A, size)), Scripted([])).select([(A, size)], prompt, {A: overlap}, 0.0)
    return policy.shown[0]


@pytest.mark.parametrize(
    ("size", "prompt", "blocks", "tokens"),
    [
        (16, 100, 3, 48),
        (16, 100, 6, 96),
        (16, 96, 6, 80),  # a whole hit: the last token is computed, and with it its block
        (16, 97, 6, 96),
        (16, 97, 9, 96),
        (32, 64, 2, 32),
        (1, 10, 10, 9),
        (16, 16, 1, 0),
        (16, 1, 1, 0),
        (16, 0, 1, 0),
    ],
)
def test_an_overlap_is_whole_blocks_and_leaves_a_token_to_compute(
    size: int, prompt: int, blocks: int, tokens: int
) -> None:
    found = shown(size, prompt, Overlap(blocks, blocks))
    assert (found.overlap_tokens, found.credit_tokens) == (tokens, tokens)


@repeatable
@given(st.integers(1, 64), st.integers(0, 3000), st.integers(0, 100), st.integers(0, 100))
def test_overlaps_stay_in_their_bounds(size: int, prompt: int, one: int, other: int) -> None:
    blocks, gpu = max(one, other), min(one, other)
    found = shown(size, prompt, Overlap(blocks, gpu))
    assert found.overlap_tokens % size == 0
    assert 0 <= found.overlap_tokens <= max(0, prompt - 1)
    assert found.overlap_tokens == max(n for n in range(0, blocks * size + 1, size) if n == 0 or n < prompt)
    assert min(gpu * size, found.overlap_tokens) <= found.credit_tokens <= found.overlap_tokens


def test_lower_tiers_count_less() -> None:
    found = shown(16, 200, Overlap(blocks=10, gpu_blocks=4))
    assert found.overlap_tokens == 160
    assert found.credit_tokens == 64 + 0.75 * 96


def test_workers_of_different_block_sizes_are_compared_in_tokens() -> None:
    ranks = [(A, 16), (B, 32)]
    matches = {A: Overlap(4, 4), B: Overlap(3, 3)}
    decision = scheduler(OverlapCost(1, 0), *ranks).select(ranks, 200, matches, 0.0)
    assert decision.costs == {A: 200 - 64, B: 200 - 96}
    assert decision == Decision(B, "least cost", decision.costs, 200, 96, 96)


def test_a_decision_explains_itself() -> None:
    ranks = [(A, 16), (B, 16), (C, 16)]
    choosing = scheduler(OverlapCost(1, 0), *ranks)
    for _ in range(2):
        choosing.reserve(Decision(A, "", {}, 500, 480, 480))
    decision = choosing.select(ranks, 100, {A: Overlap(6, 6), C: Overlap(2, 2)}, 0.0)
    assert decision.costs == {A: 2 * 20 + 4 + 1000, B: 100, C: 68}
    assert decision == Decision(C, "least cost", decision.costs, 100, 32, 96)
    assert decision.prefill_tokens == 68


@pytest.mark.parametrize(("matches", "overlaps"), [(None, (None, None)), ({}, (0, 0))])
def test_no_look_up_is_told_from_no_match(
    matches: dict[WorkerRank, Overlap] | None, overlaps: tuple[int | None, int | None]
) -> None:
    for pinned in (False, True):
        decision = scheduler(LeastLoaded(), (A, 16)).select([(A, 16)], 50, matches, 0.0, pinned)
        assert (decision.overlap_tokens, decision.best_overlap_tokens) == overlaps
        assert decision.prefill_tokens == 50


def test_a_pinned_request_takes_the_least_loaded_rank_of_its_worker() -> None:
    ranks = [(rank("a", n), 16) for n in range(3)]
    choosing = scheduler(RoundRobin(), *ranks)
    seen = []
    for _ in range(6):
        decision = choosing.select(ranks, 100, {ranks[0][0]: Overlap(2, 2)}, 0.0, pinned=True)
        assert decision.reason == "named by the request"
        assert decision.overlap_tokens == (32 if decision.rank.dp_rank == 0 else 0)
        choosing.reserve(decision)
        seen.append(decision.rank.dp_rank)
    assert Counter(seen) == {0: 2, 1: 2, 2: 2}


@repeatable
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 400),
    st.sampled_from([(1.0, 0.0), (0.0, 0.0), (1.0, 0.7)]),
    st.integers(0, 5),
)
def test_selecting_changes_no_load_and_the_same_seed_selects_the_same(
    state: list[tuple[int, int]], prompt: int, setting: tuple[float, float], seed: int
) -> None:
    ranks = [(rank(str(n)), 16) for n in range(len(state))]
    matches = {each: Overlap(blocks, blocks) for (each, _), (_, blocks) in zip(ranks, state, strict=True)}
    choosing = [scheduler(OverlapCost(*setting), *ranks, seed=seed) for _ in range(2)]
    for one in choosing:
        for (each, _), (tokens, _) in zip(ranks, state, strict=True):
            one.reserve(Decision(each, "", {}, tokens, None, None))
    book = choosing[0]._book
    before = book.get_metrics(0.0)
    decisions = [[one.select(ranks, prompt, matches, 0.0) for _ in range(3)] for one in choosing]
    assert decisions[0] == decisions[1]
    assert set(decisions[0][0].costs) == {each for each, _ in ranks}
    assert book.get_metrics(0.0) == before


@pytest.mark.parametrize(
    "policy",
    [RoundRobin(), Random(), LeastLoaded(), PowerOfTwo(), OverlapCost(1, 0), OverlapCost(1, 1)],
    ids=lambda p: type(p).__name__,
)
def test_what_is_selected_is_booked_as_it_was_decided(policy: Policy) -> None:
    ranks = [(A, 16), (B, 16)]
    choosing = scheduler(policy, *ranks)
    decision = choosing.select(ranks, 100, {A: Overlap(2, 2), B: Overlap(2, 1)}, 0.0)
    reservation = choosing.reserve(decision)
    assert choosing._book.load(decision.rank, 0.0) == Load(1, 68, 100)
    reservation.release()
    assert {found.load for found in choosing._book.get_metrics(0.0).values()} == {Load()}


@pytest.mark.parametrize("policy", [LeastLoaded(), OverlapCost(1, 0), OverlapCost(0, 0)], ids=["least", "kv", "kv0"])
def test_a_burst_between_two_reports_spreads(policy: Policy) -> None:
    """Every report says idle all the while: only the bookings tell."""
    ranks = [(rank(name), 16) for name in "abcdefgh"]
    choosing = scheduler(policy, *ranks)
    for each, _ in ranks:
        idle = LoadReport(each.worker_id, 0, 1, -1, True, request_active_slots=0, kv_active_blocks=0)
        choosing._book.on_report(idle, 0.0)
    chosen = Counter(_route(choosing, ranks) for _ in range(64))
    assert set(chosen.values()) == {8}


def test_a_burst_on_one_prefix_overflows_from_its_holder() -> None:
    """The holder is worth its cache only until its queue costs more than the prefill elsewhere."""
    ranks = [(rank(name), 16) for name in "abcd"]
    choosing = scheduler(OverlapCost(1, 0), *ranks)
    chosen = Counter[WorkerRank]()
    for _ in range(40):
        decision = choosing.select(ranks, 1000, {A: Overlap(50, 50)}, 0.0)
        choosing.reserve(decision)
        chosen[decision.rank] += 1
    assert chosen[A] > max(count for each, count in chosen.items() if each != A)
    assert len(chosen) == 4


def _route(choosing: Scheduler, ranks: list[tuple[WorkerRank, int]]) -> WorkerRank:
    decision = choosing.select(ranks, 100, None, 0.0)
    choosing.reserve(decision)
    return decision.rank
