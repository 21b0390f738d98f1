"""Who goes first: the order of a plain list, and between tenants that of what they were served."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.line import Entry, Line, Target
from router.scheduling.shares import Shares
from tests.router.scheduling.candidates import repeatable

WORKS = st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0])
NEVER = float("inf")


def urgency(now: float, arrived: float, priority: int, work: float) -> tuple[int, float]:
    return priority, -(now - arrived) / max(1e-3, work)


@repeatable
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(-1, 1), WORKS, st.booleans(), st.integers(0, 1)), max_size=60))
def test_with_one_tenant_it_is_that_of_response_ratios_whoever_leaves(
    all_: list[tuple[float, int, float, bool, int]],
) -> None:
    line: Line[int] = Line()
    for who, (arrived, priority, work, _, lane) in enumerate(all_):
        line.add(who, Entry(arrived, arrived, NEVER, priority, 0), lane)
        line.see(who, work, work, Target(0, 0))
    for who, (*_, leaves, _) in enumerate(all_):
        if leaves:
            line.remove(who)
    stay = [who for who, (*_, leaves, lane) in enumerate(all_) if not leaves and lane == 0]
    expected = sorted(stay, key=lambda who: urgency(11.0, *all_[who][:3]))
    assert list(line.order(11.0, [0], None)) == [(who, (0, 0, 0)) for who in expected]
    for lane, rows in line.by_lane({0}):
        works = np.zeros(1)
        line.add_work(works, 0, rows)
        held = [
            work for work, leaves, at in ((each[2], each[3], each[4]) for each in all_[1:]) if not leaves and at == lane
        ]
        assert works[0] == pytest.approx(sum(held))
    assert {lane for lane, _ in line.by_lane({0})} == {lane for *_, leaves, lane in all_[1:] if not leaves}


TENANTS = np.array([0.0, 0.1703, 0.3907])
"""Their counters, which no work takes to the same value."""
ASKED = st.tuples(
    st.integers(0, 1100), st.integers(-1, 1), st.sampled_from([0.013, 0.53, 2.07, 9.01]), st.integers(0, 2)
)
"""When it came (in hundredths of a second), its priority, its work, and its tenant."""


def line_of(all_: list[tuple[int, int, float, int]], targets: list[tuple[int, Target]]) -> Line[int]:
    """`targets`: the lane and the target of each."""
    line: Line[int] = Line()
    for who, ((came, priority, work, tenant), (lane, target)) in enumerate(zip(all_, targets, strict=False)):
        line.add(who, Entry(came / 100, came / 100, NEVER, priority, tenant), lane)
        line.see(who, work, work, target)
    return line


@repeatable
@given(st.lists(ASKED, max_size=40))
def test_between_tenants_it_is_that_of_what_each_will_have_been_served_by_then(
    all_: list[tuple[int, int, float, int]],
) -> None:
    urgencies = [urgency(11.0, came / 100, priority, work) for came, priority, work, _ in all_]
    tags = [0.0] * len(all_)
    served = TENANTS.tolist()
    for who in sorted(range(len(all_)), key=urgencies.__getitem__):
        *_, work, tenant = all_[who]
        tags[who] = served[tenant]
        served[tenant] += work
    expected = sorted(range(len(all_)), key=lambda who: (all_[who][1], tags[who]))
    line = line_of(all_, [(0, Target(0, 0))] * len(all_))
    assert [who for who, _ in line.order(11.0, [0], TENANTS)] == expected


THERE = (0, Target(0, 1))
TARGETS = st.sampled_from([THERE] * 5 + [(1, Target(0, 1)), (0, Target(1, 1)), (0, Target(0, 0))])


@repeatable
@given(st.lists(ASKED, min_size=20, max_size=40), st.lists(TARGETS, min_size=40, max_size=40), ASKED, st.booleans())
def test_what_goes_before_a_new_request_is_what_will_be_ahead_of_it_for_its_target(
    all_: list[tuple[int, int, float, int]],
    targets: list[tuple[int, Target]],
    new: tuple[int, int, float, int],
    alone: bool,
) -> None:
    line, (lane, target), (_, priority, work, tenant) = line_of(all_, targets), THERE, new
    then = 11.0 + work
    found = line.work_before(then, priority, lane, target, None if alone else (tenant, TENANTS))
    line.add(-1, Entry(11.0, 11.0, NEVER, priority, tenant), lane)
    line.see(-1, work, work, target)
    order = [who for who, _ in line.order(then, [0, 1], None if alone else TENANTS)]
    ahead = [who for who in order[: order.index(-1)] if targets[who] == THERE]
    assert found == pytest.approx(sum(all_[who][2] for who in ahead))


class Counters:
    """One server, and requests of several tenants that all came at once."""

    def __init__(self) -> None:
        self.line: Line[int] = Line()
        self.shares = Shares()
        self.tenants: dict[int, str] = {}
        self.served: defaultdict[str, float] = defaultdict(float)
        self.now = 0.0

    def ask(self, tenant: str, work: float, priority: int = 0) -> int:
        who = len(self.tenants)
        self.tenants[who] = tenant
        self.line.add(who, Entry(self.now, self.now, NEVER, priority, self.shares.enter(tenant)), 0)
        self.line.see(who, work, work, None)
        return who

    def serve(self) -> int:
        served = self.shares.served if self.shares.contested else None
        who, _ = next(self.line.order(self.now, [0], served))
        charge = self.line.work(who)
        self.shares.leave(self.line.remove(who)[0], charge)
        self.served[self.tenants[who]] += charge
        self.now += charge
        return who


@repeatable
@given(st.lists(st.lists(st.sampled_from([0.01, 0.1, 0.7, 2.0]), min_size=1, max_size=20), min_size=2, max_size=4))
def test_while_tenants_wait_none_is_served_more_than_a_request_beyond_another(all_: list[list[float]]) -> None:
    """The bound of the virtual token counter, 2 · the most work of a request, holds at any moment."""
    counters = Counters()
    for number, works in enumerate(all_):
        for work in works:
            counters.ask(str(number), work)
    most = max(work for works in all_ for work in works)
    while all(counters.shares.waiting(str(number)) for number in range(len(all_))):
        counters.serve()
        shares = [counters.served[str(number)] for number in range(len(all_))]
        assert max(shares) - min(shares) <= most + 1e-9


@repeatable
@given(st.integers(1, 200), st.sampled_from([0.01, 0.3, 2.0]), st.sampled_from([0.01, 0.3, 2.0]), st.integers(0, 30))
def test_a_flood_costs_another_no_more_than_one_request_of_it(
    flood: int, large: float, own: float, before: int
) -> None:
    counters = Counters()
    for _ in range(flood + before):
        counters.ask("flood", large)
    for _ in range(before):
        counters.serve()
    began = counters.now
    mine = counters.ask("mine", own)
    while counters.serve() != mine:
        pass
    assert counters.now - began <= large + own + 1e-9


@repeatable
@given(st.lists(st.tuples(st.sampled_from("abc"), WORKS, st.integers(-1, 1)), min_size=1, max_size=40))
def test_everybody_is_served_once(all_: list[tuple[str, float, int]]) -> None:
    counters = Counters()
    asked = [counters.ask(*each) for each in all_]
    served = [counters.serve() for _ in asked]
    assert sorted(served) == asked
    assert len(counters.line) == 0


def test_nobody_saves_up_while_idle() -> None:
    counters = Counters()
    for _ in range(20):
        counters.ask("busy", 1.0)
    counters.ask("idle", 1.0)
    for _ in range(12):
        counters.serve()
    for _ in range(8):
        counters.ask("idle", 1.0)
    counters.served.clear()
    for _ in range(8):
        counters.serve()
    assert counters.served == {"busy": 4.0, "idle": 4.0}


def test_a_smaller_priority_goes_before_all_tenants_and_is_charged() -> None:
    counters = Counters()
    for _ in range(4):
        counters.ask("a", 1.0)
    urgent = [counters.ask("b", 1.0, -1) for _ in range(3)]
    usual = counters.ask("b", 1.0)
    assert [counters.serve() for _ in range(3)] == urgent
    assert [counters.serve() for _ in range(4)] != [usual] * 4
    assert counters.serve() == usual, "it has had its share"


def test_tenants_that_are_gone_are_forgotten() -> None:
    shares = Shares()
    shares.enter("stays")
    for number in range(1000):
        shares.leave(shares.enter(str(number)), 0.5)
        shares.leave(shares.enter("stays"), 1.0)
    assert len(shares._numbers) < 5
    assert len(shares._served) < 5


def test_work_counts_where_it_would_go_and_nowhere_if_that_is_not_known() -> None:
    line: Line[str] = Line()
    for who, work, target in (("a", 1.0, Target(0, 1)), ("b", 2.0, Target(1, 0)), ("c", 4.0, None)):
        line.add(who, Entry(0.0, 0.0, NEVER, 0, 0), 0)
        line.see(who, work, work, target)
    works = np.zeros((2, 2))
    for part in (0, 1):
        line.add_work(works[part], part, line.rows_with_target("abcd"))
    assert works.tolist() == [[0.0, 1.0], [2.0, 0.0]]


def test_rows_are_used_again() -> None:
    line: Line[int] = Line()
    for who in range(1000):
        line.add(who, Entry(who, who, NEVER, 0, 0), 0)
        if who >= 10:
            line.remove(who - 10)
    assert len(line._who) < 64
    assert [who for who, _ in line.order(2000.0, [0], None)] == list(range(990, 1000))


def test_the_order_is_told_as_far_as_it_is_read() -> None:
    """A pass over ten thousand looks at a few; what leaves or comes during it changes nothing for the others."""
    line: Line[int] = Line()
    for who in range(1000):
        line.add(who, Entry(who, who, NEVER, 0, 0), 0)
    order = line.order(2000.0, [0], None)
    assert [next(order)[0] for _ in range(2)] == [0, 1]
    for who in (0, 3, 500):
        line.remove(who)
    for who in range(1000, 1100):  # more than there are rows: they are numbered anew
        line.add(who, Entry(who, who, NEVER, 0, 0), 0)
    rest = [who for who, _ in order if who in line]
    assert rest == [who for who in range(2, 1000) if who not in {3, 500}]


def test_who_has_waited_too_long_is_found() -> None:
    line: Line[str] = Line()
    line.add("a", Entry(0.0, 5.0, NEVER, 0, 0), 0)
    line.add("b", Entry(0.0, 9.0, 7.0, 0, 0), 0)
    assert line.waited_over(4.0, 9.0) == []
    assert line.waited_over(4.0, 9.5) == ["a"]
    assert (line.past_limit(7.0), line.past_limit(7.5)) == ([], ["b"])
