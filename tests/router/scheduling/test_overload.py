"""The queue under limits: who is held, refused and given up, that it clears by itself, and that nobody is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from router.scheduling.admission import Objectives, QueueFull, QueueTimeout, Refusal
from router.scheduling.auto import Auto
from router.scheduling.balance import RoundRobin
from router.scheduling.candidates import Candidates, Split
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Policy
from router.scheduling.figures import LOAD_ROWS
from router.scheduling.limits import Limits
from router.scheduling.load import LoadBook, SharedTable
from router.scheduling.others import Others
from router.scheduling.pass_budget import MOST
from router.scheduling.queue import TICK
from tests.examples import examples
from tests.router.scheduling.candidates import holding_on_gpu, named, rank, repeatable
from tests.router.scheduling.comings import Comings
from tests.router.scheduling.waiting import Desk, Gate, Request

POLICIES: dict[str, Callable[[], Policy]] = {"auto": lambda: Cheapest(Auto()), "round-robin": RoundRobin}


@pytest.fixture(params=POLICIES, name="policy")
def each_policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


# -- concurrency


@pytest.mark.parametrize(("limits", "sent"), [(Limits(max_worker_concurrency=2), 4), (Limits(max_concurrency=3), 3)])
def test_beyond_the_limit_requests_are_held_by_every_policy(policy: Policy, limits: Limits, sent: int) -> None:
    desk = Desk(policy, "ab", limits)
    requests = [desk.ask(prompt=1) for _ in range(10)]
    assert [request.fate for request in requests] == ["sent"] * sent + ["waits"] * (10 - sent)
    for end in range(10):
        desk.sent[end].end()
        assert len(desk.sent) == min(10, end + 1 + sent)
    assert desk.at_rest


def test_turns_are_taken_among_those_that_have_room() -> None:
    desk = Desk(RoundRobin(), "abc", Limits(max_worker_concurrency=1))
    for _ in range(3):
        desk.ask()
    waiting = [desk.ask() for _ in range(2)]
    desk.sent[1].end()
    desk.sent[0].end()
    chosen = [request.decision.rank.worker_id for request in waiting if request.decision]
    assert chosen == ["b", "a"]


def test_who_names_a_worker_waits_for_it_and_holds_up_nobody_else() -> None:
    desk = Desk(RoundRobin(), "ab", Limits(max_worker_concurrency=1))
    only_a = named("a")
    pinned = [desk.ask(candidates=only_a, pinned=True) for _ in range(3 * MOST)]
    first = desk.ask("1")
    second = desk.ask("2")
    assert first.decision
    assert (first.decision.rank, second.fate) == (rank("b"), "waits")
    first.end()
    assert second.decision
    assert second.decision.rank == rank("b")
    for request in pinned:
        request.end()
    second.end()
    assert desk.at_rest


def test_who_waits_beside_a_full_worker_is_counted_where_it_will_go() -> None:
    gate = Gate()
    desk = Desk(Cheapest(gate), "abc", Limits(max_worker_concurrency=2))
    for _ in range(2):
        desk.ask(candidates=named("a"), pinned=True)
    running = [desk.ask() for _ in "bc"]
    waiting = [desk.ask() for _ in range(2)]
    assert [request.fate for request in waiting] == ["waits", "waits"]
    ahead_at_b, ahead_at_c = gate.held[-1]
    assert ahead_at_b > 0.0
    assert ahead_at_c == 0.0
    for request in running:
        request.end()
    assert [request.decision.rank.worker_id for request in waiting if request.decision] == ["b", "c"]


def test_a_named_worker_without_limits_is_never_waited_for() -> None:
    desk = Desk(objectives=Objectives(1e-6))
    assert {desk.ask(pinned=True).fate for _ in range(5)} == {"sent"}


def test_whoever_comes_while_a_pass_is_due_does_not_slip_in() -> None:
    desk = Desk(RoundRobin(), limits=Limits(max_concurrency=1))
    first, second = desk.ask(), desk.ask()
    assert first.booking
    first.booking.release(desk.clock.now)
    third = desk.ask()
    assert (second.fate, third.fate) == ("waits", "waits")
    desk.clock.run()
    assert (second.fate, third.fate) == ("sent", "waits")


def test_whoever_comes_when_a_worker_has_come_does_not_slip_in() -> None:
    desk = Desk(RoundRobin(), "a", Limits(max_worker_concurrency=1))
    first, waiting = desk.ask(), desk.ask()
    desk.scheduler.watch(rank("b"), 16)
    desk.candidates = named("ab")
    late = desk.ask()
    assert (waiting.fate, late.fate) == ("waits", "waits")
    desk.clock.run()
    assert (waiting.fate, late.fate) == ("sent", "waits")
    for each in (first, waiting, late):
        each.end()
    assert desk.at_rest


def test_whoever_comes_when_another_process_has_left_room_does_not_slip_in() -> None:
    tables = np.zeros((2, LOAD_ROWS, 2), np.int64)
    books = [LoadBook(SharedTable(tables, own, lambda _: 0, lambda _: None)) for own in range(2)]
    here, there = (Desk(RoundRobin(), limits=Limits(max_worker_concurrency=1), book=book) for book in books)
    first, second = there.ask(), here.ask()
    first.end()
    third = here.ask(priority=-1)
    fourth = here.ask()
    assert {each.fate for each in (second, third, fourth)} == {"waits"}
    here.clock.run()
    assert (second.fate, third.fate, fourth.fate) == ("waits", "sent", "waits")
    third.end()
    assert (second.fate, fourth.fate) == ("sent", "waits")
    second.end()
    fourth.end()
    assert here.at_rest


def test_a_limit_that_is_raised_lets_all_go_that_may_at_once() -> None:
    desk = Desk(RoundRobin(), "ab", Limits(max_concurrency=1))
    requests = [desk.ask() for _ in range(50)]
    desk.queue.limits.max_concurrency = None
    desk.queue.limits.max_worker_concurrency = 20
    desk.queue.wake()
    desk.clock.run()
    assert [request.fate for request in requests].count("sent") == 40
    desk.queue.limits.max_worker_concurrency = None
    desk.queue.wake()
    desk.clock.run(TICK)
    desk.clock.run(TICK)
    assert {request.fate for request in requests} == {"sent"}


def test_a_limit_that_is_lowered_holds_until_enough_have_ended() -> None:
    desk = Desk(RoundRobin())
    running = [desk.ask() for _ in range(4)]
    desk.queue.limits.max_concurrency = 2
    waiting = desk.ask()
    for request in running[:2]:
        request.end()
        assert waiting.fate == "waits"
    running[2].end()
    assert waiting.fate == "sent"


def test_a_worker_that_comes_takes_those_that_wait() -> None:
    desk = Desk(RoundRobin(), limits=Limits(max_worker_concurrency=1))
    desk.ask()
    waiting = [desk.ask() for _ in range(2)]
    desk.scheduler.watch(rank("b"), 16)
    desk.candidates = named("ab")
    desk.clock.run(TICK)
    assert [request.fate for request in waiting] == ["sent", "waits"]


def test_all_that_wait_are_told_when_the_last_worker_goes() -> None:
    desk = Desk(RoundRobin(), limits=Limits(max_concurrency=1))
    first = desk.ask()
    waiting = [desk.ask() for _ in range(3 * MOST)]
    desk.candidates = named("")
    desk.clock.run(4 * TICK)
    assert {request.fate for request in waiting} == {"no candidates"}
    first.end()


def test_whoever_comes_while_those_that_wait_are_told_that_nobody_is_left_is_told_too() -> None:
    desk = Desk(limits=Limits(max_concurrency=1))
    first = desk.ask()
    waiting = [desk.ask() for _ in range(3 * MOST)]
    desk.candidates = named("")
    desk.queue.dispatch()
    assert {request.fate for request in waiting} == {"waits", "no candidates"}
    desk.queue.wake()
    assert desk.ask().fate == "no candidates"
    first.end()


def test_whose_candidates_change_waits_with_those_who_have_the_same() -> None:
    desk = Desk(RoundRobin(), "ab", Limits(max_worker_concurrency=1))
    only_a, only_b = named("a"), named("b")
    at_a, at_b = desk.ask(candidates=only_a), desk.ask(candidates=only_b)
    next_at_a, last_at_a = desk.ask(candidates=only_a), desk.ask(candidates=only_a)
    next_at_b = desk.ask(candidates=only_b)
    urgent = desk.ask(candidates=only_a, priority=-1)
    urgent.chosen_from = only_b
    at_a.end()
    desk.clock.run(TICK)
    assert [each.fate for each in (next_at_a, last_at_a, urgent)] == ["sent", "waits", "waits"]
    at_b.end()
    assert (urgent.fate, next_at_b.fate) == ("sent", "waits")
    for each in (urgent, next_at_a, last_at_a, next_at_b):
        each.end()
    assert desk.at_rest


def test_short_work_goes_first_when_room_was_all_that_was_missing() -> None:
    desk = Desk(Cheapest(Auto()), limits=Limits(max_concurrency=1))
    first = desk.ask("1")
    for name, prompt in zip("abc", (8_000, 100, 30_000), strict=True):
        desk.ask(name, prompt)
    desk.clock.run(0.01)
    first.end()
    for _ in range(3):
        desk.sent[-1].end()
    assert desk.names == "1bac"


# -- a queue with an end


def test_a_full_queue_refuses_whoever_comes() -> None:
    desk = Desk(limits=Limits(max_queue=2))
    first = desk.ask()
    waiting = [desk.ask() for _ in range(2)]
    refused = desk.ask()
    assert (refused.fate, [request.fate for request in waiting]) == ("refused", ["waits", "waits"])
    assert isinstance(refused.refusal, QueueFull)
    assert (refused.refusal.held, refused.refusal.retry_after) == (2, 1)
    first.end()
    assert desk.ask().fate == "waits", "one of them has gone"


def test_without_a_queue_what_cannot_go_is_refused() -> None:
    desk = Desk(limits=Limits(max_queue=0))
    first, second = desk.ask(), desk.ask()
    assert (first.fate, second.fate) == ("sent", "refused")
    first.end()
    assert desk.ask().fate == "sent"
    assert desk.clock.timers == []


def test_a_tenant_that_floods_gives_way_to_others_in_a_full_queue() -> None:
    desk = Desk(limits=Limits(max_queue=6))
    desk.ask()
    flood = [desk.ask(tenant="flood") for _ in range(8)]
    others = [desk.ask(tenant="other") for _ in range(5)]
    assert [request.fate for request in flood] == ["waits"] * 3 + ["refused"] * 5
    assert [request.fate for request in others] == ["waits"] * 3 + ["refused"] * 2
    assert len(desk.queue) == 6


def test_nobody_gives_way_to_one_that_would_then_hold_more() -> None:
    desk = Desk(limits=Limits(max_queue=5))
    desk.ask()
    flood = [desk.ask(tenant="flood") for _ in range(5)]
    others = [desk.ask(tenant="other") for _ in range(3)]
    assert [request.fate for request in flood] == ["waits"] * 3 + ["refused"] * 2
    assert [request.fate for request in others] == ["waits"] * 2 + ["refused"]


def test_of_one_tenant_the_least_urgent_gives_way() -> None:
    desk = Desk(limits=Limits(max_queue=3))
    desk.ask()
    one, two, three = (desk.ask(priority=priority) for priority in (1, 1, 0))
    assert desk.ask(priority=1).fate == "refused"
    assert desk.ask(priority=0).fate == "waits"
    assert [request.fate for request in (one, two, three)] == ["waits", "refused", "waits"]


def test_one_that_gave_way_may_come_again_at_once_and_push_out_another() -> None:
    desk = Desk(limits=Limits(max_queue=2))
    desk.ask()
    again: list[Request] = []

    def come_again(_: Request) -> None:
        again.append(desk.ask(tenant="other", priority=-1))

    one = desk.ask(tenant="flood")
    two = desk.ask(tenant="flood", on_refused=come_again)
    three = desk.ask(tenant="other")
    assert [request.fate for request in (one, two, three, *again)] == ["waits", "refused", "refused", "waits"]
    assert len(desk.queue) == 2
    assert three.outcomes == 1


def test_nobody_is_held_for_longer_than_the_limit() -> None:
    desk = Desk(limits=Limits(queue_timeout=2.0))
    desk.ask()
    second = desk.ask()
    desk.clock.run(1.0)
    third = desk.ask()
    desk.clock.run(1.0 + TICK / 2)
    assert (second.fate, third.fate) == ("waits", "waits")
    desk.clock.run(TICK)
    assert (second.fate, third.fate, len(desk.queue)) == ("refused", "waits", 1)
    assert isinstance(second.refusal, QueueTimeout)
    assert 2.0 < second.refusal.waited <= 2.0 + 2 * TICK
    assert second.refusal.limit == 2.0


@pytest.mark.parametrize(
    ("limits", "objectives"),
    [(Limits(queue_timeout=1.0), Objectives()), (Limits(max_concurrency=1), Objectives(1.0))],
)
def test_one_that_is_given_up_may_withdraw_another(limits: Limits, objectives: Objectives) -> None:
    """Whose time is over too, by the queue's limit or by its objective."""
    desk = Desk(limits=limits, objectives=objectives)
    desk.ask(prompt=0)
    other: list[Request] = []
    first = desk.ask(on_refused=lambda _: desk.queue.withdraw(other[0]))
    other.append(desk.ask())
    desk.clock.run(2.0)
    assert (first.fate, other[0].fate, len(desk.queue)) == ("refused", "waits", 0)


def test_who_waits_for_room_is_refused_as_soon_as_its_objective_has_passed() -> None:
    desk = Desk(limits=Limits(max_concurrency=1), objectives=Objectives(1.0))
    first, second = desk.ask(), desk.ask()
    patient = desk.ask(ttft_slo=2.0)
    desk.clock.run(0.9)
    assert second.fate == "waits"
    desk.clock.run(0.2)
    assert (second.fate, patient.fate) == ("refused", "waits")
    assert isinstance(second.refusal, Refusal)
    assert second.refusal.waited > second.refusal.limit == 1.0
    desk.clock.run(1.0)
    assert (patient.fate, len(desk.queue)) == ("refused", 0)
    first.end()
    assert desk.at_rest


def test_the_wait_that_is_stated_is_that_of_those_who_left() -> None:
    desk = Desk(limits=Limits(max_queue=40))
    for _ in range(41):
        desk.ask()
    for _ in range(20):
        desk.clock.run(0.5)
        desk.sent[-1].end()
        desk.ask()
    refusal = desk.ask().refusal
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after == pytest.approx(40 * 0.5, rel=0.1)


@pytest.mark.parametrize(("held", "timeout", "least", "most"), [(1, None, 1, 1), (1, 60.0, 1, 1), (30, 5.0, 5, 5)])
def test_the_wait_that_is_stated_is_never_0_nor_more_than_anybody_waits(
    held: int, timeout: float | None, least: int, most: int
) -> None:
    desk = Desk(limits=Limits(max_queue=held, queue_timeout=timeout))
    for _ in range(held + 1):
        desk.ask()
    desk.clock.run(1.0)
    refusal = desk.ask().refusal
    assert isinstance(refusal, QueueFull)
    assert least <= refusal.retry_after <= most


# -- tenants


def test_tenants_take_turns_however_many_each_sends() -> None:
    desk = Desk()
    first = desk.ask("1")
    for _ in range(20):
        desk.ask("f", tenant="flood")
        desk.clock.run(0.01)
    for _ in range(3):
        desk.ask("o", tenant="other")
    desk.clock.run(0.01)
    first.end()
    for _ in range(8):
        desk.sent[-1].end()
    turns = desk.names[1:]
    while turns.count("o") == 3 and turns[:-1].count("o") == 3:
        turns = turns[:-1]
    assert len(turns) <= 6
    assert all(abs(turns[:end].count("f") - turns[:end].count("o")) <= 1 for end in range(len(turns)))


def test_a_tenant_is_charged_for_what_is_still_to_be_computed_of_its_prompts() -> None:
    """They wait for room, and what is cached shows only when there is some."""
    desk = Desk(limits=Limits(max_concurrency=1))
    cached = holding_on_gpu({rank("a"): 900})
    desk.ask("r", tenant="running")
    for _ in range(12):
        desk.ask("n", 16_000, tenant="new")
        desk.ask("c", 16_000, tenant="cached", matches=cached)
    for _ in range(13):
        desk.sent[-1].end()
        desk.clock.run()
    assert desk.names[1:].count("c") > desk.names.count("n") + 6


def test_a_tenant_is_charged_for_all_prompts_of_a_batch() -> None:
    desk = Desk(limits=Limits(max_concurrency=1))
    desk.ask("r", tenant="running")
    for _ in range(12):
        desk.ask("b", 1_000, tenant="batches", others=Others(15, 15_000))
        desk.ask("s", 1_000, tenant="singles")
    for _ in range(13):
        desk.sent[-1].end()
        desk.clock.run()
    assert desk.names[1:].count("s") > desk.names.count("b") + 6


def test_what_a_tenant_is_sent_without_waiting_counts_while_others_wait() -> None:
    desk = Desk(RoundRobin(), "ab", Limits(max_worker_concurrency=1))
    first = desk.ask("1", candidates=named("a"))
    only_a = named("a")
    for _ in range(2):
        desk.ask("w", tenant="waits", candidates=only_a)
    for _ in range(3):
        desk.ask("d", tenant="direct").end()
    desk.ask("d", tenant="direct", candidates=only_a)
    first.end()
    desk.sent[-1].end()
    desk.sent[-1].end()
    assert desk.names == "1dddwwd"


def test_a_flood_of_another_is_no_reason_to_refuse_by_objective() -> None:
    """Most of it goes after whoever comes."""
    desk = Desk(objectives=Objectives(30.0))
    desk.ask().first_token()
    for _ in range(30):
        desk.ask(prompt=20_000, tenant="flood", ttft_slo=1e6)
    desk.clock.run(10.0)
    assert desk.ask(prompt=20_000, tenant="flood").fate == "refused"
    assert desk.ask(prompt=20_000, tenant="other").fate == "waits"


# -- all of it


class Overload(Comings):
    """Requests of several tenants come, wait, end and leave under limits that change."""

    def __init__(self) -> None:
        self.limits = Limits(max_queue=5, queue_timeout=3.0, max_concurrency=4, max_worker_concurrency=2)
        super().__init__(Desk(Cheapest(Auto()), "abc", self.limits))
        parted = Split(named("a"), (named("bc"),), (np.array([False, True]),), (False,))
        self.sets = [self.desk.candidates, named("a"), named("bc"), Candidates([], parted)]
        self.sets.append(Candidates([(rank("b"), 16), (rank("c"), 16)], parted))

    @rule(
        prompt=st.sampled_from([0, 100, 40_000]),
        priority=st.sampled_from([0, 0, -1]),
        tenant=st.sampled_from(["", "x", "y"]),
        known=st.booleans(),
        kind=st.integers(0, 4),
    )
    def ask(self, prompt: int, priority: int, tenant: str, known: bool, kind: int) -> None:
        full = len(self.those("sent")) >= (self.limits.max_concurrency or 100)
        request = self.desk.ask(
            "", prompt, priority=priority, tenant=tenant, known=known, candidates=self.sets[kind], pinned=kind == 1
        )
        self.all.append(request)
        assert not (full and request.fate == "sent")

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.desk.clock.run(seconds)

    @rule(most=st.sampled_from([None, 1, 3]), each=st.sampled_from([None, 1, 2]), held=st.sampled_from([0, 3, 8]))
    def limit(self, most: int | None, each: int | None, held: int) -> None:
        self.limits.max_concurrency, self.limits.max_worker_concurrency, self.limits.max_queue = most, each, held
        self.desk.queue.wake()

    @invariant()
    def each_is_told_once(self) -> None:
        assert {request.outcomes for request in self.all} <= {0, 1}

    @invariant()
    def choosing_never_fails(self) -> None:
        assert not self.those("failed")

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.desk.clock.timers or not len(self.desk.queue)

    def teardown(self) -> None:
        """The flood stops: whatever waits gets its turn or is given up, and all counters are back to 0."""
        for _ in range(len(self.all) + 1):
            self.end_all()
        self.desk.clock.run(5.0)
        self.end_all()
        self.desk.clock.run(1.0)
        assert not self.those("waits")
        assert self.desk.at_rest
        assert self.desk.clock.timers == []
        queue = self.desk.queue
        held = queue._held
        assert (held.shares._numbers, held.lanes._numbers, held.work) == ({}, {}, {})
        assert self.desk.ask(prompt=1).fate == "sent", "the next is served at once"


TestOverload = Overload.TestCase
TestOverload.settings = settings(repeatable, max_examples=examples(60), stateful_step_count=30)
