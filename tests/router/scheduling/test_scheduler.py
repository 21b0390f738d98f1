"""Selecting explains itself and changes nothing; reserving is seen at once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.events import LoadReport
from indexer.matches import Matches, Overlap
from indexer.types import WorkerRank
from router.scheduling import figures, load
from router.scheduling.auto import Auto
from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.scheduling.candidates import Candidates, Split
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Choice, CostPolicy, Decision, Policy, Situation, Uniform
from router.scheduling.figures import Counts
from router.scheduling.lmetric import LMetric
from router.scheduling.load import Load, LoadBook
from router.scheduling.overlap import OverlapCost
from router.scheduling.scheduler import Scheduler
from tests.router.scheduling.candidates import Scripted, holding, holding_on_gpu, named, rank, repeatable

A, B, C = rank("a"), rank("b"), rank("c")


class Watching:
    """A policy that takes the first and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: Situation

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        self.shown = situation
        return Choice(0, None, "first")


def watching(choosing: Scheduler, candidates: Candidates) -> Scheduler:
    for each, size in zip(candidates.ranks, candidates.block_sizes.tolist(), strict=True):
        choosing.watch(each, size)
    return choosing


def scheduler(policy: Policy, candidates: Candidates, seed: int = 0) -> Scheduler:
    return watching(Scheduler(policy, LoadBook(), random.Random(seed)), candidates)


def shown(size: int, prompt: int, matches: Matches | None) -> tuple[float, float]:
    """(overlap, credit) of worker a, in tokens."""
    policy, candidates = Watching(), named("a", size)
    watching(Scheduler(policy, LoadBook(), Scripted([])), candidates).select(candidates, prompt, matches, 0.0)
    (overlap,), (credit,) = policy.shown.overlap_tokens, policy.shown.credit_tokens
    return overlap, credit


def booked(candidates: Candidates, position: int, tokens: int) -> Decision:
    """A decision of so many tokens without overlap, made by hand."""
    return Decision(candidates, Choice(position, None, ""), tokens, None, None)


def told(decision: Decision) -> tuple[WorkerRank, str, int, int | None, int | None]:
    return (
        decision.rank,
        decision.reason,
        decision.prompt_tokens,
        decision.overlap_tokens,
        decision.best_overlap_tokens,
    )


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
    assert shown(size, prompt, holding({A: Overlap(blocks, blocks)})) == (tokens, tokens)
    assert shown(size, prompt, holding_on_gpu({A: blocks})) == (tokens, tokens)


@repeatable
@given(st.integers(1, 64), st.integers(0, 3000), st.integers(0, 100), st.integers(0, 100))
def test_overlaps_stay_in_their_bounds(size: int, prompt: int, one: int, other: int) -> None:
    blocks, gpu = max(one, other), min(one, other)
    overlap, credit = shown(size, prompt, holding({A: Overlap(blocks, gpu)}))
    assert overlap % size == 0
    assert 0 <= overlap <= max(0, prompt - 1)
    assert overlap == max(n for n in range(0, blocks * size + 1, size) if n == 0 or n < prompt)
    assert min(gpu * size, overlap) <= credit <= overlap


def test_lower_tiers_count_less() -> None:
    assert shown(16, 200, holding({A: Overlap(blocks=10, gpu_blocks=4)})) == (160, 64 + 0.75 * 96)


def test_without_a_look_up_nobody_holds_anything() -> None:
    assert shown(16, 200, None) == (0, 0)


def test_each_candidate_is_shown_with_its_own_figures() -> None:
    candidates = Candidates([(A, 16), (B, 32), (C, 16)])
    policy = Watching()
    choosing = scheduler(policy, candidates)
    choosing.reserve(booked(candidates, 1, 100), 0.0)
    choosing.reserve(booked(candidates, 2, 7), 0.0)
    choosing.reserve(booked(candidates, 2, 8), 0.0)
    choosing.select(candidates, 150, holding({C: Overlap(3, 1), B: Overlap(2, 2)}), 0.0)
    seen = policy.shown
    assert (seen.candidates, seen.prompt_tokens) == (candidates, 150)
    assert [list(figures) for figures in (seen.requests, seen.prefill_tokens, seen.active_tokens)] == [
        [0, 1, 2],
        [0, 100, 15],
        [0, 100, 15],
    ]
    assert list(seen.overlap_tokens) == [0, 64, 48]
    assert list(seen.credit_tokens) == [0, 64, 16 + 0.75 * 32]
    assert seen.busy == 2 / 3


def test_workers_of_different_block_sizes_are_compared_in_tokens() -> None:
    candidates = Candidates([(A, 16), (B, 32)])
    matches = holding_on_gpu({A: 4, B: 3})
    decision = scheduler(Cheapest(OverlapCost(1), 0), candidates).select(candidates, 200, matches, 0.0)
    assert decision.costs == {A: 200 - 64, B: 200 - 96}
    assert told(decision) == (B, "least cost", 200, 96, 96)


def test_a_decision_explains_itself() -> None:
    candidates = named("abc")
    choosing = scheduler(Cheapest(OverlapCost(1), 0), candidates)
    for _ in range(2):
        choosing.reserve(Decision(candidates, Choice(0, None, ""), 500, 480, 480), 0.0)
    decision = choosing.select(candidates, 100, holding_on_gpu({A: 6, C: 2}), 0.0)
    assert decision.costs == {A: 2 * 20 + 4 + 1000, B: 100, C: 68}
    assert told(decision) == (C, "least cost", 100, 32, 96)
    assert decision.prefill_tokens == 68
    assert repr(decision) == "<Decision for c#0: least cost, overlap 32 of 100 tokens>"
    decision.settle()
    assert (decision.costs, decision.predicted) == ({}, None), "as long as the request runs, that would take memory"


def test_a_decision_that_nothing_was_added_up_for_has_no_costs() -> None:
    candidates = named("abc")
    assert scheduler(RoundRobin(), candidates).select(candidates, 100, None, 0.0).costs == {}


@pytest.mark.parametrize(("matches", "overlaps"), [(None, (None, None)), (holding_on_gpu({}), (0, 0))])
def test_no_look_up_is_told_from_no_match(matches: Matches | None, overlaps: tuple[int | None, int | None]) -> None:
    candidates = named("a")
    for pinned in (False, True):
        decision = scheduler(LeastLoaded(), candidates).select(candidates, 50, matches, 0.0, pinned)
        assert (decision.overlap_tokens, decision.best_overlap_tokens) == overlaps
        assert decision.prefill_tokens == 50


@pytest.mark.parametrize(("ranks", "pinned", "read"), [(1, True, 0), (2, True, 1), (2, False, 1)])
def test_of_requests_without_prompts_no_more_is_worked_out_than_is_read(
    monkeypatch: pytest.MonkeyPatch, ranks: int, pinned: bool, read: int
) -> None:
    """All figures of all ranks take more time than all else that is decided."""
    candidates = Candidates([(rank("a", number), 16) for number in range(ranks)])
    choosing, worked_out, sum_loads = scheduler(LeastLoaded(), candidates), [], figures.sum_loads
    choosing.book.reserve(rank("a", ranks - 1), 5, 5)

    def counted(*columns: Any) -> Counts:
        worked_out.append("loads")
        return sum_loads(*columns)

    monkeypatch.setattr(load, "sum_loads", counted)
    monkeypatch.setattr(figures, "work_out", lambda *_: pytest.fail("all figures"))
    assert choosing.select(candidates, 0, None, 0.0, pinned).rank == rank("a", 0)
    assert worked_out == ["loads"] * read


def ranks_for_pinned(policy: Policy, matches: Matches | None, requests: int, seed: int = 0) -> list[int]:
    """Which of three ranks of the worker that they name takes each of so many requests that come at once."""
    candidates = Candidates((rank("a", n), 16) for n in range(3))
    choosing = scheduler(policy, candidates, seed)
    decisions = []
    for _ in range(requests):
        decisions.append(choosing.select(candidates, 100, matches, 0.0, pinned=True))
        choosing.reserve(decisions[-1], 0.0)
    assert {decision.reason for decision in decisions} == {"named by the request"}
    return [decision.rank.dp_rank for decision in decisions]


def test_a_pinned_request_takes_the_least_loaded_rank_of_its_worker_where_no_prompt_is_looked_up() -> None:
    assert Counter(ranks_for_pinned(RoundRobin(), None, 6)) == {0: 2, 1: 2, 2: 2}


def test_routers_that_see_the_same_do_not_all_send_pinned_requests_to_the_first_rank() -> None:
    assert {ranks_for_pinned(LeastLoaded(), None, 1, seed)[0] for seed in range(20)} == {0, 1, 2}


@pytest.mark.parametrize("cost", [Auto(), OverlapCost(1.0), LMetric()])
def test_a_pinned_request_goes_to_the_rank_of_its_worker_that_holds_its_prefix(cost: CostPolicy) -> None:
    for holder in range(3):
        assert ranks_for_pinned(Cheapest(cost), holding_on_gpu({rank("a", holder): 6}), 1) == [holder]


def test_a_pinned_request_leaves_the_rank_that_holds_its_prefix_where_too_many_wait() -> None:
    ranks = ranks_for_pinned(Cheapest(OverlapCost(1.0)), holding_on_gpu({rank("a", 1): 3}), 6)
    assert ranks[0] == 1
    assert set(ranks) == {0, 1, 2}


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
    candidates = named(map(str, range(len(state))))
    matches = holding_on_gpu({each: blocks for each, (_, blocks) in zip(candidates.ranks, state, strict=True)})
    choosing = [scheduler(Cheapest(OverlapCost(setting[0]), setting[1]), candidates, seed) for _ in range(2)]
    for one in choosing:
        for position, (tokens, _) in enumerate(state):
            one.reserve(booked(candidates, position, tokens), 0.0)
    book = choosing[0].book
    before = book.get_metrics(0.0)
    decisions = [[one.select(candidates, prompt, matches, 0.0) for _ in range(3)] for one in choosing]
    assert list(map(told, decisions[0])) == list(map(told, decisions[1]))
    assert [decision.costs for decision in decisions[0]] == [decision.costs for decision in decisions[1]]
    assert set(decisions[0][0].costs) == set(candidates.ranks)
    assert book.get_metrics(0.0) == before


@pytest.mark.parametrize(
    "policy",
    [RoundRobin(), Random(), LeastLoaded(), PowerOfTwo(), Cheapest(OverlapCost(1), 0), Cheapest(OverlapCost(1), 1)],
    ids=lambda p: type(p).__name__,
)
def test_what_is_selected_is_booked_as_it_was_decided(policy: Policy) -> None:
    candidates = named("ab")
    choosing = scheduler(policy, candidates)
    decision = choosing.select(candidates, 100, holding({A: Overlap(2, 2), B: Overlap(2, 1)}), 0.0)
    reservation = choosing.reserve(decision, 0.0)
    assert choosing.book.load(decision.rank, 0.0) == Load(1, 68, 100)
    assert sum(choosing.book.loads(candidates, 0.0).requests) == 1
    reservation.release(0.0)
    assert {found.load for found in choosing.book.get_metrics(0.0).values()} == {Load()}


@pytest.mark.parametrize(
    "policy", [LeastLoaded(), Cheapest(OverlapCost(1), 0), Cheapest(OverlapCost(0), 0)], ids=["least", "kv", "kv0"]
)
def test_a_burst_between_two_reports_spreads(policy: Policy) -> None:
    """Every report says idle all the while: only the bookings tell."""
    candidates = named("abcdefgh")
    choosing = scheduler(policy, candidates)
    for each in candidates.ranks:
        idle = LoadReport(each.worker_id, 0, 1, -1, True, request_active_slots=0, kv_active_blocks=0)
        choosing.book.on_report(idle, 0.0)
    chosen = Counter(_route(choosing, candidates, None) for _ in range(64))
    assert set(chosen.values()) == {8}


def test_a_burst_on_one_prefix_overflows_from_its_holder() -> None:
    """The holder is worth its cache only until its queue costs more than the prefill elsewhere."""
    candidates = named("abcd")
    choosing = scheduler(Cheapest(OverlapCost(1), 0), candidates)
    chosen = Counter(_route(choosing, candidates, holding_on_gpu({A: 50}), 1000) for _ in range(40))
    assert chosen[A] > max(count for each, count in chosen.items() if each != A)
    assert len(chosen) == 4


def _route(choosing: Scheduler, candidates: Candidates, matches: Matches | None, prompt: int = 100) -> WorkerRank:
    decision = choosing.select(candidates, prompt, matches, 0.0)
    choosing.reserve(decision, 0.0)
    return decision.rank


PARTED = Candidates([], Split(named("ab"), (named("c"),) * 2, (np.array([False]),) * 2, (False,) * 2))


@pytest.mark.parametrize("candidates", [named("ab"), PARTED])
def test_a_request_may_have_a_policy_of_its_own(candidates: Candidates) -> None:
    """The scheduler's own is not asked then, whether for a worker or for one that only prefills."""
    own, other = Watching(), RoundRobin()
    choosing = scheduler(own, candidates)
    chosen = [choosing.select(candidates, 100, None, 0.0, policy=other).position for _ in range(3)]
    assert sorted(set(chosen)) == [0, 1]
    assert not hasattr(own, "shown")
    assert choosing.select(candidates, 100, None, 0.0).position == 0


@pytest.mark.parametrize(("policy", "kept"), [(LeastLoaded(), False), (Cheapest(LMetric()), True)])
def test_the_backlog_is_kept_from_when_somebody_asks_for_estimates(policy: Policy, kept: bool) -> None:
    candidates = named("ab")
    choosing = scheduler(policy, candidates)
    choosing.backlog.wanted = False
    choosing.select(candidates, 100, holding_on_gpu({A: 1}), 0.0)
    assert choosing.backlog.wanted is kept
