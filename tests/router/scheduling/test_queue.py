"""Requests that wait in the router: who goes first, when, where to, and that nothing of them is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from indexer.matches import Matches
from indexer.types import WorkerRank
from router.scheduling.admission import Objectives, Refusal
from router.scheduling.auto import Auto
from router.scheduling.auto_costs import ENOUGH
from router.scheduling.backlog import Entry
from router.scheduling.balance import LeastLoaded
from router.scheduling.booking import PrefillBooking
from router.scheduling.candidates import Candidates, Split
from router.scheduling.cheapest import Cheapest
from router.scheduling.figures import MUCH_LATER
from router.scheduling.latency import PREFILL_PRIOR, Prefill
from router.scheduling.limits import Limits
from router.scheduling.load import Load
from router.scheduling.others import Others
from router.scheduling.overlap import OverlapCost
from router.scheduling.pass_budget import MOST, MOST_IN_ALL
from router.scheduling.queue import TICK
from tests.examples import examples
from tests.router.scheduling.candidates import holding_on_gpu, named, rank, repeatable
from tests.router.scheduling.comings import Comings
from tests.router.scheduling.predictions import prefill_factors, prefill_seconds, step_seconds
from tests.router.scheduling.waiting import Desk, Gate, Loyal, Request

NOBODY = named("")


# -- at once, or later


def test_what_may_go_goes_at_once_and_no_timer_is_set() -> None:
    desk = Desk()
    request = desk.ask()
    assert request.fate == "sent"
    assert desk.loads == {Load(1, 100, 100)}
    assert desk.clock.timers == []
    request.end()
    assert desk.at_rest
    assert desk.clock.timers == []


def test_what_is_held_is_sent_when_its_rank_is_free() -> None:
    desk = Desk()
    first, second = desk.ask("1"), desk.ask("2")
    assert (first.fate, second.fate, len(desk.queue)) == ("sent", "waits", 1)
    assert desk.loads == {Load(1, 100, 100)}, "what waits is not booked"
    first.end()
    assert (second.fate, len(desk.queue)) == ("sent", 0)
    second.end()
    assert desk.at_rest


def test_a_pass_is_never_made_within_a_call_from_outside() -> None:
    desk = Desk()
    first, second = desk.ask(), desk.ask()
    assert first.booking
    first.booking.release(desk.clock.now)
    assert second.fate == "waits"
    desk.clock.run()
    assert second.fate == "sent"


def test_the_first_token_is_reason_enough_for_a_pass() -> None:
    desk = Desk()
    first, second = desk.ask(), desk.ask()
    looks = second.looks
    first.first_token()
    desk.clock.run()
    assert second.looks == looks + 1


def test_a_fault_in_answering_one_leaves_nobody_else_waiting_for_ever() -> None:
    def fail(_: Request) -> None:
        raise RuntimeError("a fault of the answer's own")

    desk = Desk(limits=Limits(queue_timeout=1.0))
    desk.ask()
    desk.ask(on_refused=fail)
    last = desk.ask()
    with pytest.raises(RuntimeError):
        desk.clock.run(2.0)
    desk.clock.run(2.0)
    assert last.fate == "refused"


def test_a_fault_in_choosing_for_one_leaves_nobody_behind_it_waiting() -> None:
    class Odd(Request):
        def matches(self) -> Matches | None:
            if self.looks:
                raise ZeroDivisionError
            return super().matches()

    desk = Desk()
    first, odd = desk.ask(), Odd(desk, "", 100)
    desk.queue.submit(odd)
    last = desk.ask()
    assert (odd.fate, last.fate) == ("waits", "waits")
    first.end()
    assert (odd.fate, last.fate) == ("failed", "sent")
    last.end()
    assert desk.at_rest


def test_the_passing_of_time_is_reason_enough() -> None:
    desk = Desk(Cheapest(Auto()))
    desk.ask(prompt=20_000)
    second = desk.ask()
    desk.clock.run(desk.backlog[0] - 2 * ENOUGH)
    assert (second.fate, len(desk.queue)) == ("waits", 1)
    desk.clock.run(1.5 * ENOUGH)
    assert (second.fate, len(desk.queue)) == ("sent", 0)


def late(desk: Desk, prompt: int) -> float:
    """Seconds after which the prefill of an idle rank is late."""
    return 2 * desk.scheduler.latency.prefill_work(Prefill(prompt, prompt)) + MUCH_LATER


def test_nobody_waits_because_all_workers_are_late_alike() -> None:
    desk = Desk(Cheapest(Auto()), "ab")
    first, second = desk.ask(prompt=20_000), desk.ask(prompt=20_000)
    desk.clock.run(late(desk, 20_000) - 2 * TICK)
    held = desk.ask()
    desk.clock.run(TICK)
    assert held.fate == "waits"
    desk.clock.run(2 * TICK)
    assert held.fate == "sent"
    long = [desk.ask(prompt=20_000) for _ in range(3)]
    assert [request.fate for request in long] == ["sent", "sent", "waits"], "what comes behind counts as ever"
    for request in (first, second, held, *long):
        request.end()
    assert desk.at_rest


def test_a_worker_that_is_late_gets_nothing_while_another_one_is_not() -> None:
    desk = Desk(Cheapest(Auto()), "ab")
    stuck, other = desk.ask(prompt=20_000), desk.ask(prompt=20_000)
    desk.clock.run(late(desk, 20_000))
    other.first_token()
    next_ = desk.ask(prompt=20_000)
    held = desk.ask()
    desk.clock.run(1.0)
    assert next_.decision
    assert other.decision
    assert next_.decision.rank == other.decision.rank
    assert held.fate == "waits"
    stuck.end()


def test_a_worker_that_is_late_gets_nothing_because_others_have_no_room() -> None:
    desk = Desk(Cheapest(Auto()), "ab", Limits(max_worker_concurrency=2))
    stuck, other = desk.ask(prompt=20_000), desk.ask(prompt=20_000)
    other.first_token()
    another = desk.ask()
    another.first_token()
    assert another.decision
    assert other.decision
    assert another.decision.rank == other.decision.rank
    held = desk.ask()
    desk.clock.run(2 * late(desk, 20_000))
    assert held.fate == "waits"
    another.end()
    assert held.decision
    assert held.decision.rank == other.decision.rank
    stuck.end()


def test_there_is_one_timer_however_many_wait_and_none_when_nobody_does() -> None:
    desk = Desk()
    first = desk.ask()
    waiting = [desk.ask() for _ in range(50)]
    assert desk.clock.timers == [TICK]
    for _ in range(20):
        desk.clock.run(TICK / 3)
        assert len(desk.clock.timers) == 1
    for _ in range(3):
        first.first_token()
        desk.queue.wake()
        assert len(desk.clock.timers) == 2, "the tick, and a pass at once"
    desk.clock.run()
    for request in waiting:
        desk.queue.withdraw(request)
    desk.clock.run(2 * TICK)
    assert desk.clock.timers == []


def test_waking_where_nobody_waits_does_nothing() -> None:
    desk = Desk()
    desk.queue.wake()
    assert desk.clock.timers == []


def test_a_pass_looks_at_a_few_only() -> None:
    desk = Desk()
    desk.ask()
    waiting = [desk.ask() for _ in range(10 * MOST)]
    looks = [request.looks for request in waiting]
    desk.clock.run(TICK)
    looked = [request.looks - before for request, before in zip(waiting, looks, strict=True)]
    assert (sum(looked), max(looked)) == (MOST, 1)
    assert looked[:MOST] == [1] * MOST, "those who came first, as all are alike"


def test_each_look_is_told_how_many_are_held_for_each_of_its_own_candidates() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate), "abc")
    two = named("ab")
    first, _ = desk.ask(candidates=two), desk.ask(candidates=two)
    for _ in range(3):
        desk.ask(candidates=two)
    desk.ask(candidates=named("c"))
    assert gate.held_requests == [0.0, 0.0, 0.0, 0.5, 1.0, 0.0]
    del gate.held_requests[:]
    first.end()
    desk.clock.run()
    assert gate.held_requests == [1.5, 1.0, 1.0], "one of them was sent"


def test_a_queue_for_one_rank_keeps_nobody_from_another() -> None:
    desk = Desk(Cheapest(Loyal()), "ab")
    at_a, at_b = (holding_on_gpu({rank(name): 5}) for name in "ab")
    first = desk.ask(matches=at_b)
    desk.ask(matches=at_a)
    waiting = [desk.ask(matches=at_a) for _ in range(10 * MOST)]
    last, one_more = desk.ask(matches=at_b), desk.ask(matches=at_b)
    looks = [request.looks for request in waiting]
    first.end()
    assert (last.fate, one_more.fate) == ("sent", "waits")
    assert sum(request.looks for request in waiting) - sum(looks) == MOST, "the others for a are passed over"
    last.end()
    assert one_more.fate == "sent"
    assert {request.fate for request in waiting} == {"waits"}


def test_of_those_for_one_rank_each_pass_looks_at_the_first_beyond_the_first_few() -> None:
    desk = Desk(Cheapest(Loyal()), "abc")
    at = {name: holding_on_gpu({rank(name): 5}) for name in "abc"}
    first = [desk.ask(matches=at[name]) for name in "abc"]
    few = [desk.ask(matches=at["a"]) for _ in range(MOST)]
    others = [desk.ask(matches=at[name]) for name in "bbbcc"]
    looks = [request.looks for request in others]
    desk.clock.run(TICK)
    assert [each.looks - before for each, before in zip(others, looks, strict=True)] == [1, 0, 0, 1, 0]
    first[1].end()
    assert [request.fate for request in others] == ["sent", "waits", "waits", "waits", "waits"]
    assert {request.fate for request in few} == {"waits"}


def test_those_passed_over_are_ahead_of_those_behind_them_in_the_same_pass() -> None:
    loyal = Loyal()
    desk = Desk(Cheapest(loyal), "ab")
    at_a, at_b = (holding_on_gpu({rank(name): 5}) for name in "ab")
    desk.ask(matches=at_a)
    desk.ask(matches=at_b)
    waiting = [desk.ask(matches=at_a) for _ in range(3 * MOST)]
    desk.ask(matches=at_b)
    works = [*loyal.held[-1]]
    loyal.held.clear()
    desk.clock.run(TICK)
    assert loyal.held[-1] == pytest.approx(works), "all that were there when it came are ahead of it"
    assert works[0] > 0
    assert len(waiting) == 3 * MOST
    desk.ask(matches=at_b)
    assert loyal.held[-1][0] == pytest.approx(works[0]), "each of them once"


def test_however_many_ranks_are_waited_for_a_pass_looks_at_a_few_only() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    desk = Desk(Cheapest(Loyal()), names)
    for name in names:
        desk.ask(matches=holding_on_gpu({rank(name): 5}))
    waiting = [desk.ask(matches=holding_on_gpu({rank(name): 5})) for name in 2 * names]
    looks = [request.looks for request in waiting]
    desk.clock.run(TICK)
    assert sum(request.looks for request in waiting) - sum(looks) == 2 * MOST


def test_however_many_sets_of_candidates_are_waited_for_a_pass_looks_into_a_few_and_the_next_go_on() -> None:
    names = [f"w{number:03}" for number in range(5 * MOST_IN_ALL)]
    desk = Desk(ranks=names)
    alone = [Candidates([(each, 16)]) for each in desk.candidates.ranks]
    first = [desk.ask(candidates=each) for each in alone]
    waiting = [desk.ask(candidates=each) for each in 2 * alone]
    urgent = desk.ask(candidates=alone[-1], priority=-1)
    everybody = [*waiting, urgent]
    looks = [request.looks for request in everybody]
    desk.queue.dispatch()
    assert urgent.looks == 2, "in the order of those who wait"
    assert sum(request.looks for request in everybody) - sum(looks) <= 2 * MOST_IN_ALL
    desk.clock.run()
    assert desk.sent == first
    looked = {request.chosen_from for request, before in zip(everybody, looks, strict=True) if request.looks > before}
    assert looked == set(alone), "without any time passing"
    assert desk.clock.timers == [pytest.approx(TICK)]
    first[-1].end()
    assert urgent.fate == "sent"
    desk.queue.dispatch()
    first[0].end()
    assert waiting[0].fate == "sent", "though the first pass of the round had looked into its set already"
    assert [request.fate for request in waiting].count("sent") == 1


def test_those_not_looked_at_are_ahead_of_who_comes_all_the_same() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate))
    desk.ask()
    waiting = [desk.ask() for _ in range(3 * MOST)]
    nothing = np.zeros(len(desk.candidates))
    work = prefill_seconds(desk.scheduler.latency, desk.candidates, nothing, 100, 0)
    desk.clock.run(TICK)
    desk.ask()
    assert gate.held[-1] == pytest.approx((work * len(waiting)).tolist())


def test_those_not_looked_at_are_ahead_of_who_comes_after_the_fleet_has_changed() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate), "bc")
    for _ in "bc":
        desk.ask()
    waiting = [desk.ask() for _ in range(6 * MOST)]
    desk.scheduler.watch(rank("a"), 16)
    desk.candidates = named("abc")
    desk.clock.run(TICK)
    assert [request.fate for request in waiting].count("sent") == 1, "to the worker that has come"
    left = len(waiting) - 1
    desk.ask()
    assert gate.held_requests[-1] == pytest.approx(left / 3)
    nothing = np.zeros(3)
    works = prefill_seconds(desk.scheduler.latency, desk.candidates, nothing, 100, 0)
    assert sum(gate.held[-1]) == pytest.approx(left * float(works[0]), rel=1e-3)
    desk.candidates = named("bc")
    desk.clock.run(TICK)
    late = desk.ask(ttft_slo=float(works[0]) * left / 2)
    assert late.fate == "refused", "for all that are ahead"


def test_who_waits_for_a_pair_goes_elsewhere_when_there_are_no_pairs_any_more() -> None:
    desk = Desk(ranks="bdp")
    pair = Split(named("p"), (named("d"),), (np.array([False]),), (False,))
    desk.candidates = Candidates([], pair)
    first, second = desk.ask(), desk.ask()
    assert (first.fate, second.fate) == ("sent", "waits")
    desk.candidates = named("b")
    desk.clock.run(TICK)
    assert second.fate == "sent"


# -- in which order


def order_of(desk: Desk, first: Request) -> str:
    """Of all that wait, one after another."""
    first.end()
    while len(desk.queue):
        desk.sent[-1].end()
    desk.sent[-1].end()
    assert desk.at_rest
    return desk.names[1:]


def test_equals_go_in_the_order_of_their_coming() -> None:
    desk = Desk()
    first = desk.ask("1")
    for name in "abcde":
        desk.ask(name)
        desk.clock.run(0.01)
    assert order_of(desk, first) == "abcde"


def test_short_work_goes_first() -> None:
    desk = Desk()
    first = desk.ask("1")
    for name, prompt in zip("abcd", (8_000, 100, 30_000, 2_000), strict=True):
        desk.ask(name, prompt)
    desk.clock.run(0.01)
    assert order_of(desk, first) == "bdac"


def test_what_is_cached_makes_work_short() -> None:
    desk = Desk()
    first = desk.ask("1")
    desk.ask("a", 2_000)
    desk.ask("b", 8_000, matches=holding_on_gpu({rank("a"): 490}))
    desk.clock.run(0.01)
    assert order_of(desk, first) == "ba"


def test_who_waits_long_goes_before_shorter_work() -> None:
    """(Waited + work) / work: nobody starves."""
    desk = Desk()
    first = desk.ask("1")
    desk.ask("a", 8_000)
    desk.clock.run(60.0)
    desk.ask("b", 100)
    desk.clock.run(0.5)
    assert order_of(desk, first) == "ab"


def test_priority_goes_before_all_of_it() -> None:
    desk = Desk()
    first = desk.ask("1")
    desk.ask("a", 100)
    desk.clock.run(60.0)
    for name, priority in zip("bcd", (-1, 1, -2), strict=True):
        desk.ask(name, 30_000, priority=priority)
    assert order_of(desk, first) == "dbac"


# -- where to


def test_who_waits_is_given_to_whoever_is_free_first() -> None:
    desk = Desk(ranks="ab")
    one, two = desk.ask(), desk.ask()
    waiting = desk.ask()
    assert one.decision
    assert two.decision
    assert {one.decision.rank, two.decision.rank} == {rank("a"), rank("b")}
    two.end()
    assert waiting.decision
    assert waiting.decision.rank == two.decision.rank


def test_who_waits_goes_to_workers_that_come_later() -> None:
    desk = Desk()
    desk.ask()
    waiting = desk.ask()
    desk.scheduler.watch(rank("b"), 16)
    desk.candidates = named("ab")
    desk.clock.run(TICK)
    assert waiting.decision
    assert waiting.decision.rank == rank("b")


def test_who_waits_when_the_last_worker_goes_is_told() -> None:
    desk = Desk()
    first, waiting = desk.ask(), desk.ask()
    desk.candidates = NOBODY
    desk.clock.run(TICK)
    assert (waiting.fate, len(desk.queue)) == ("no candidates", 0)
    assert desk.ask().fate == "no candidates"
    first.end()


@pytest.mark.parametrize("policy", [Cheapest(Auto()), Cheapest(Gate())], ids=["auto", "gate"])
def test_nobody_waits_for_a_rank_that_is_idle(policy: Cheapest) -> None:
    desk = Desk(policy, "abc")
    requests = [desk.ask(prompt=prompt) for prompt in (50_000, 10, 50_000)]
    assert {request.fate for request in requests} == {"sent"}


def test_auto_spreads_a_burst_and_sends_more_than_one_to_each() -> None:
    desk = Desk(Cheapest(Auto()), "ab")
    for _ in range(40):
        desk.ask(prompt=1_000)
    chosen = [request.decision.rank.worker_id for request in desk.sent if request.decision]
    assert 2 < chosen.count("a") == chosen.count("b") < 20
    assert len(desk.queue) == 40 - len(chosen)


def test_a_policy_that_opens_no_ranks_holds_nobody() -> None:
    for policy in (LeastLoaded(), Cheapest(OverlapCost(1))):
        desk = Desk(policy)
        assert {desk.ask().fate for _ in range(50)} == {"sent"}


def test_without_tokens_it_waits_like_all_and_is_never_refused() -> None:
    desk = Desk(objectives=Objectives(1e-6))
    first, second = desk.ask(known=False), desk.ask(known=False)
    assert (first.fate, second.fate) == ("sent", "waits")
    first.end()
    assert second.fate == "sent"


def test_the_work_of_one_without_tokens_is_not_known_to_be_ahead_of_others() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate))
    desk.ask()
    assert desk.ask(known=False).fate == desk.ask().fate == "waits"
    assert gate.held[-1] == [0]


# -- objectives

OVERLAP = Cheapest(OverlapCost(1))


def test_what_would_miss_its_objective_is_refused_and_leaves_nothing() -> None:
    desk = Desk(OVERLAP, objectives=Objectives(0.5))
    first, second = desk.ask(prompt=20_000), desk.ask()
    assert (first.fate, second.fate) == ("sent", "refused")
    assert isinstance(second.refusal, Refusal)
    assert second.refusal.predicted > second.refusal.limit == 0.5
    assert (len(desk.queue), desk.clock.timers) == (0, [])
    first.end()
    assert desk.at_rest


def test_it_is_queued_until_it_would_not() -> None:
    desk = Desk(OVERLAP, objectives=Objectives(0.5), action="queue")
    first, second = desk.ask(prompt=20_000), desk.ask()
    assert second.fate == "waits"
    desk.clock.run(desk.backlog[0] - 0.4)
    assert (second.fate, second.refusal) == ("sent", None)
    first.end()


def test_patience_has_an_end() -> None:
    desk = Desk(OVERLAP, objectives=Objectives(0.5), action="queue", patience=2.0)
    desk.ask(prompt=200_000)
    second = desk.ask()
    desk.clock.run(1.9)
    assert second.fate == "waits"
    desk.clock.run(0.2)
    assert (second.fate, len(desk.queue)) == ("refused", 0)
    assert isinstance(second.refusal, Refusal)
    assert second.refusal.waited >= 2.0


def test_a_held_one_is_refused_when_it_has_waited_too_long() -> None:
    """holding by its policy, with the action `reject`: what it waited counts."""
    desk = Desk(objectives=Objectives(1.0))
    first, second = desk.ask(), desk.ask()
    first.first_token()
    desk.clock.run(0.5)
    assert second.fate == "waits"
    desk.clock.run(0.6)
    assert second.fate == "refused"


def test_each_may_have_an_objective_of_its_own() -> None:
    desk = Desk(OVERLAP)
    desk.ask(prompt=20_000)
    assert desk.ask(ttft_slo=0.5).fate == "refused"
    assert desk.ask(ttft_slo=50.0).fate == "sent"
    assert desk.ask().fate == "sent"


def test_who_would_go_first_is_not_refused_for_those_whom_it_overtakes() -> None:
    desk = Desk()
    first = desk.ask()
    first.first_token()
    for _ in range(10):
        desk.ask(prompt=20_000, priority=1)
    assert desk.ask(priority=0, ttft_slo=5.0).fate != "refused"


# -- leaving


def test_who_leaves_is_neither_sent_nor_booked_afterwards() -> None:
    desk = Desk()
    first, second, third = desk.ask(), desk.ask(), desk.ask()
    desk.queue.withdraw(second)
    desk.queue.withdraw(second)
    first.end()
    assert (second.fate, third.fate) == ("waits", "sent")
    third.end()
    assert desk.at_rest
    desk.clock.run(1.0)
    assert second.fate == "waits"
    assert desk.clock.timers == []


def test_who_has_left_is_not_ahead_of_anybody() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate))
    first, second = desk.ask(), desk.ask(prompt=20_000)
    desk.queue.withdraw(second)
    assert len(desk.queue) == 0
    desk.ask()
    assert gate.held[-1] == [0]
    third, fourth = desk.ask(prompt=20_000), desk.ask()
    desk.queue.withdraw(third)
    desk.clock.run()
    assert fourth.looks > 1
    desk.ask()
    assert gate.held[-1][0] < 0.1
    first.end()


def test_what_is_ahead_is_less_once_its_prompt_is_cached_meanwhile() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate))
    first, second = desk.ask(), desk.ask(prompt=20_000)
    desk.ask()
    before = gate.held[-1][0]
    second._matches = holding_on_gpu({rank("a"): 20_000 // 16 - 1})
    desk.clock.run(TICK)
    desk.ask()
    assert 0.0 < gate.held[-1][0] < before / 10
    first.end()


def test_nobody_is_ahead_when_all_that_waited_were_sent() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate))
    first, second = desk.ask(), desk.ask(prompt=20_000)
    first.end()
    assert second.fate == "sent"
    desk.ask()
    assert gate.held[-1] == [0]


def test_one_that_is_sent_within_a_pass_may_withdraw_another() -> None:
    desk = Desk()
    first = desk.ask()
    third: list[Request] = []
    second = desk.ask(on_sent=[lambda _: desk.queue.withdraw(third[0]), lambda _: None])
    third.append(desk.ask())
    first.end()
    assert (second.fate, third[0].fate, len(desk.queue)) == ("sent", "waits", 0)


def test_a_retry_goes_through_the_queue_again() -> None:
    """Its worker fails as soon as it is sent there, within the pass."""
    desk = Desk(ranks="ab")

    def fail(request: Request) -> None:
        assert request.booking
        assert request.decision
        request.booking.release(desk.clock.now)
        left = [each for each in desk.candidates.ranks if each != request.decision.rank]
        request.chosen_from = Candidates((each, 16) for each in left)
        request.booking = None
        desk.queue.submit(request)

    one, two = desk.ask(), desk.ask()
    waiting = desk.ask(on_sent=[fail])
    one.end()
    assert (waiting.fate, len(desk.queue)) == ("waits", 1), "the other is busy"
    assert one.decision
    assert two.decision
    two.end()
    assert waiting.decision
    assert (waiting.fate, waiting.decision.rank) == ("sent", two.decision.rank)
    waiting.end()
    assert desk.at_rest


# -- what nobody hears of


def test_an_answer_that_is_not_streamed_has_its_prefill_done_when_it_should_be() -> None:
    desk = Desk(OVERLAP)
    request = desk.ask(prompt=20_000, streamed=False)
    seconds = desk.backlog[0]
    desk.clock.run(seconds / 2)
    assert desk.backlog[0] == pytest.approx(seconds / 2, abs=1e-3)
    desk.clock.run(seconds)
    other = desk.ask()
    alone = Desk(OVERLAP)
    alone.ask()
    assert desk.backlog[0] == pytest.approx(alone.backlog[0])
    request.end()
    other.end()
    assert desk.at_rest


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_takes_long_keeps_no_other_rank_busy(gone: bool) -> None:
    """Nor when it has ended before its time."""
    desk = Desk(Cheapest(Auto()), "ab")
    long, short = desk.ask(prompt=200_000, streamed=False), desk.ask(prompt=8_000, streamed=False)
    assert long.decision
    assert short.decision
    assert long.decision.rank != short.decision.rank
    first, second = map(desk.candidates.ranks.index, (long.decision.rank, short.decision.rank))
    seconds = desk.backlog
    if gone:
        long.end()
    desk.clock.run(seconds[second] + PREFILL_PRIOR[0] + 0.01)
    third = desk.ask(prompt=8_000)
    assert third.decision
    assert third.fate == "sent"
    assert gone or third.decision.rank == short.decision.rank
    third.end()
    assert desk.backlog[second] == 0
    assert (desk.backlog[first] > seconds[second]) is not gone
    for request in (long, short):
        request.end()
    assert desk.at_rest


def test_nothing_is_learned_of_prefill_or_steps_from_an_answer_that_came_as_a_whole() -> None:
    desk = Desk(OVERLAP)
    ones = [desk.ask(prompt=1_000, streamed=False) for _ in range(20)]
    latency, ranks = desk.scheduler.latency, desk.candidates
    before = prefill_factors(latency, ranks, 0.0).tolist(), latency._step_factors.at(0)
    for request in ones:
        desk.clock.run(5.0)
        assert request.booking
        request.booking.generated(1, desk.clock.now)
        request.first_token()
        request.booking.generated(1, desk.clock.now)
        request.end()
    assert (prefill_factors(latency, ranks, 0.0).tolist(), latency._step_factors.at(0)) == before
    assert desk.at_rest


def test_a_whole_answer_that_came_sooner_than_its_first_token_should_have_tells_that_prefill_is_quick() -> None:
    desk = Desk(Cheapest(Auto()))
    expected = prefill_seconds(desk.scheduler.latency, desk.candidates, np.zeros(1), 20_000, 0.0)[0]
    for _ in range(40):
        request = desk.ask(prompt=20_000, streamed=False)
        desk.clock.run(expected / 10)
        request.first_token()
        request.end()
    found = prefill_seconds(desk.scheduler.latency, desk.candidates, np.zeros(1), 20_000, desk.clock.now)[0]
    assert found == pytest.approx(expected / 10, rel=0.3)
    assert desk.at_rest


def test_a_prefill_that_nobody_heard_of_is_no_time_of_the_one_behind_it() -> None:
    desk = Desk(OVERLAP)
    unheard = desk.ask(prompt=20_000, streamed=False)
    seconds = desk.backlog[0]
    heard = desk.ask(prompt=20_000)
    desk.clock.run(2 * seconds)
    last = desk.ask(streamed=False)
    heard.first_token()
    factor = prefill_factors(desk.scheduler.latency, desk.candidates, desk.clock.now)[0]
    assert factor == pytest.approx(1.0, abs=0.1)
    for request in (unheard, heard, last):
        request.end()
    assert desk.at_rest


@pytest.mark.parametrize("streamed", [False, True])
def test_a_batch_keeps_its_rank_busy_with_all_of_its_prompts(streamed: bool) -> None:
    """Nobody hears when they are computed: the first token tells of the first prompt."""
    desk, ten = Desk(OVERLAP), Desk(OVERLAP)
    request = desk.ask(prompt=1_000, streamed=streamed, others=Others(9, 9_000))
    ones = [ten.ask(prompt=1_000) for _ in range(10)]
    assert desk.backlog[0] == pytest.approx(ten.backlog[0], rel=0.01)
    assert desk.loads == {Load(10, 10_000, 10_000)}
    factor = prefill_factors(desk.scheduler.latency, desk.candidates, 0.0)[0]
    desk.clock.run(0.05)
    request.first_token()
    assert desk.backlog[0] == pytest.approx(ten.backlog[0] - 0.05, rel=0.02)
    desk.clock.run(0.25)
    desk.ask(prompt=1).end()
    assert desk.backlog[0] == pytest.approx(ten.backlog[0] - 0.3, rel=0.05)
    desk.clock.run(1.0)
    other = desk.ask()
    assert desk.backlog[0] < 0.1
    assert prefill_factors(desk.scheduler.latency, desk.candidates, desk.clock.now)[0] == factor
    for each in (request, other, *ones):
        each.end()
    assert desk.at_rest
    assert ten.at_rest


def test_a_batch_that_ends_sooner_than_it_should_leaves_nothing() -> None:
    desk = Desk(OVERLAP)
    request = desk.ask(prompt=1_000, streamed=False, others=Others(900, 900_000))
    desk.clock.run(0.1)
    request.first_token()
    request.end()
    assert desk.backlog[0] == 0
    assert desk.at_rest


def test_tokens_of_several_answers_come_mixed_and_are_no_steps() -> None:
    desk = Desk(OVERLAP)
    latency = desk.scheduler.latency
    expected = latency._step_factors.at(0)
    for _ in range(20):
        request = desk.ask(others=Others(3))
        request.first_token()
        for _ in range(20):
            desk.clock.run(0.001)
            assert request.booking
            request.booking.generated(1, desk.clock.now)
        request.end()
    assert latency._step_factors.at(0) == expected
    assert desk.at_rest


@pytest.mark.parametrize(
    ("about", "learned"),
    [({}, True), ({"streamed": False}, False), ({"others": Others(3)}, False)],
    ids=["a stream", "an answer that came whole", "several answers"],
)
def test_how_long_answers_are_is_learned_from_single_streams(about: dict[str, Any], learned: bool) -> None:
    desk = Desk(OVERLAP)
    for _ in range(100):
        request = desk.ask(**about)
        assert request.booking
        request.booking.generated(1, desk.clock.now)
        request.first_token()
        for tokens in (40, 59):
            request.booking.generated(tokens, desk.clock.now)
        request.end()
        request.end()
    found = desk.scheduler.latency.answer_tokens
    assert found == pytest.approx(99, rel=0.01) if learned else found == 0.0
    assert desk.at_rest


def test_a_streams_first_token_is_no_step() -> None:
    """It is counted before anybody says that the prefill is done."""
    desk = Desk(OVERLAP)
    latency = desk.scheduler.latency
    nothing = desk.candidates.block_sizes * 0
    expected = step_seconds(latency, desk.candidates, nothing, nothing, 100, 0.0)[0]
    for _ in range(20):
        request = desk.ask()
        desk.clock.run(5.0)
        assert request.booking
        request.booking.generated(1, desk.clock.now)
        request.first_token()
        for _ in range(8):
            desk.clock.run(16 * expected)
            request.booking.generated(16, desk.clock.now)
        request.end()
    assert latency._step_factors.at(0) == pytest.approx(1.0, abs=0.15)


# -- all of it


class Desks(Comings):
    """Requests come, wait, go, begin, end and leave in any order; the backlog is what a plain list says."""

    def __init__(self) -> None:
        super().__init__(Desk(Cheapest(Auto()), "abc", objectives=Objectives(20.0), action="queue", patience=5.0))

    @rule(
        prompt=st.sampled_from([0, 1, 100, 3_000, 40_000]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        streamed=st.booleans(),
        known=st.sampled_from([True, True, False]),
        slo=st.sampled_from([None, None, 0.001, 3.0]),
    )
    def ask(self, prompt: int, priority: int, streamed: bool, known: bool, slo: float | None) -> None:
        about = {"priority": priority, "streamed": streamed, "known": known, "ttft_slo": slo}
        self.all.append(self.desk.ask(str(len(self.all)), prompt, **about))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.desk.clock.run(seconds)

    @precondition(lambda self: self.those("sent"))
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def go_on(self, data: st.DataObject, tokens: int) -> None:
        request = data.draw(st.sampled_from(self.those("sent")))
        assert request.booking
        request.first_token()
        request.booking.generated(tokens, self.desk.clock.now)

    @invariant()
    def there_is_one_tick_at_most_and_one_pass_at_once(self) -> None:
        timers = self.desk.clock.timers
        assert len([each for each in timers if each > 0]) <= 1
        assert len(timers) <= 2
        assert timers or not len(self.desk.queue)

    @invariant()
    def what_is_booked_is_of_those_that_were_sent(self) -> None:
        live = self.those("sent")
        requests = dict.fromkeys(self.desk.candidates.ranks, 0)
        entries: dict[WorkerRank, list[Entry]] = {each: [] for each in self.desk.candidates.ranks}
        for request in live:
            assert request.decision
            assert isinstance(request.booking, PrefillBooking)
            requests[request.decision.rank] += 1
            if request.booking._entry:
                entries[request.decision.rank].append(request.booking._entry)
        book, backlog = self.desk.scheduler.book, self.desk.scheduler.backlog
        for place, (each, line) in enumerate(entries.items()):
            assert book.load(each, self.desk.clock.now).requests == requests[each]
            assert set(backlog._lines.get(place, ())) == set(line)
            assert backlog._tables[0, 0, place] == sum(int(entry.work * 1e6) for entry in line)

    def teardown(self) -> None:
        """All that was sent ends: whoever waits gets its turn, without anybody's help but the clock's."""
        for _ in range(len(self.all) + 1):
            self.end_all()
            self.desk.clock.run(TICK)
        assert not self.those("waits")
        assert self.desk.at_rest
        self.desk.clock.run(2 * TICK)
        assert self.desk.clock.timers == []
        assert self.desk.queue._held.work == {}


TestDesksAgainstModel = Desks.TestCase
TestDesksAgainstModel.settings = settings(repeatable, max_examples=examples(80), stateful_step_count=30)
