"""How much prefill lies before each rank, against a plain list of what was sent there; and what it took, by the way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from indexer.types import RankSet, WorkerRank
from router.scheduling.backlog import Backlog, Entry
from router.scheduling.balance import LeastLoaded
from router.scheduling.figures import BACKLOG_ROWS, LATELY_MEMORY
from router.scheduling.load import LoadBook, SharedTable
from router.scheduling.present import Present
from router.scheduling.scheduler import Scheduler
from tests.examples import examples
from tests.router.scheduling.candidates import Scripted, named, rank, repeatable

A, B, STRANGER = rank("a"), rank("b"), rank("stranger")
BOTH = RankSet([A, B])


def watching(*ranks: WorkerRank) -> Backlog:
    backlog = Backlog()
    for each in ranks or (A, B):
        backlog.watch(each)
    return backlog


def left(backlog: Backlog, now: float, factors: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    found: list[float] = backlog.seconds(BOTH, np.array(factors), now).round(4).tolist()
    return found


@pytest.mark.parametrize(
    ("passed", "seconds"),
    [
        (0, 3.0),  # one of 2 s, one of 1 s
        (0.5, 2.5),
        (2, 1.0),  # the first should be done
        (3, 2.0),  # it is late by 1 s: as long again
        (5, 4.0),
    ],
)
def test_what_has_passed_of_the_first_counts_as_done(passed: float, seconds: float) -> None:
    backlog = watching()
    backlog.add(A, 2.0, 100.0)
    backlog.add(A, 1.0, 100.0)
    assert left(backlog, 100.0 + passed) == [seconds, 0]


def test_what_a_step_takes_at_least_counts_once_for_all_in_line_and_on_a_slow_rank_for_more() -> None:
    backlog = watching()
    for _ in range(3):
        backlog.add(A, 1.0, 100.0)
    for now, seconds in ((100.0, 7.0), (101.0, 6.0), (103.0, 4.0), (104.0, 5.0)):  # late by 1 s then
        assert backlog.seconds(BOTH, np.full(2, 2.0), now, 0.5).tolist() == [seconds, 0]


def test_the_next_begins_when_the_first_is_done() -> None:
    backlog = watching()
    first, second = (backlog.add(A, work, 0.0) for work in (2.0, 1.0))
    assert backlog.done(first, 5.0) == 5.0
    assert left(backlog, 5.0) == [1.0, 0]
    assert left(backlog, 5.25) == [0.75, 0]
    assert backlog.done(second, 6.5) == 1.5
    assert left(backlog, 9.0) == [0, 0]


def test_what_was_computed_of_late_fades() -> None:
    def computed(now: float) -> list[float]:
        found: list[float] = Present(scheduler, ranks, 0, None, now).computed_seconds.round(4).tolist()
        return found

    scheduler, ranks = Scheduler(LeastLoaded(), LoadBook(), Scripted([])), named("ab")
    for each in (A, B):
        scheduler.watch(each, 16)
    backlog, later = scheduler.backlog, 100.0 + LATELY_MEMORY
    backlog.done(backlog.add(A, 2.0, 100.0), 101.0)
    assert computed(100.0) == [2.0, 0]
    assert computed(later) == [pytest.approx(2.0 / math.e, abs=1e-3), 0]
    backlog.add(A, 1.0, later)
    assert computed(later) == [pytest.approx(2.0 / math.e + 1.0, abs=1e-3), 0]
    scheduler.forget(A)
    scheduler.watch(A, 16)
    assert computed(later) == [0, 0]


def test_a_slow_rank_has_longer_to_go() -> None:
    backlog = watching()
    backlog.add(A, 2.0, 0.0)
    backlog.add(B, 2.0, 0.0)
    assert left(backlog, 1.0, (3.0, 0.5)) == [5.0, 0.0]


def test_a_prefill_is_timed_from_the_first_token_before_it_or_from_when_it_was_sent() -> None:
    backlog = watching()
    first, second = (backlog.add(A, 1.0, sent) for sent in (0.0, 1.0))
    assert backlog.done(first, 3.0) == 3.0
    assert backlog.done(second, 4.0) == 1.0
    third = backlog.add(A, 1.0, 10.0)
    assert backlog.done(third, 10.5) == 0.5


def test_those_that_come_together_took_no_time_of_their_own() -> None:
    backlog = watching()
    entries = [backlog.add(A, 1.0, 0.0) for _ in range(3)]
    assert [backlog.done(entry, 2.0) for entry in entries] == [2.0, 0.0, 0.0]


def test_one_that_is_told_late_does_not_turn_time_back() -> None:
    """What nobody hears of counts as done when it was due, which may be before another's first token."""
    backlog = watching()
    unheard, heard, after = (backlog.add(A, 1.0, 0.0) for _ in range(3))
    backlog.done(heard, 5.0)
    backlog.done(unheard, 2.0)
    assert backlog.done(after, 6.0) == 1.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_nothing_is_left_in_whatever_order_they_end(order: tuple[int, ...]) -> None:
    backlog = watching()
    entries = [backlog.add(A, work, 0.0) for work in (1 / 3, 2 / 7, 1e-7)]
    for number in order:
        assert left(backlog, 0.0)[0] > 0 or number == 2
        backlog.drop(entries[number], 0.0)
        backlog.drop(entries[number], 0.0)
    assert left(backlog, 0.0) == [0, 0]
    assert backlog.busy(BOTH, 0.0) == 0


def test_one_whose_kv_is_loaded_first_stands_in_nobodys_way_until_that_is_done() -> None:
    backlog = watching()
    loading = backlog.add(A, 2.0, 0.0, joins=10.0)
    assert (left(backlog, 9.0), backlog.busy(BOTH, 9.0)) == ([0, 0], 0)
    assert left(backlog, 10.5) == [1.5, 0], "it is under way since then"
    assert backlog.done(loading, 12.0) == 12.0
    assert left(backlog, 12.0) == [0, 0]


def test_one_that_joins_does_so_behind_those_that_came_meanwhile() -> None:
    backlog = watching()
    backlog.add(A, 2.0, 0.0, joins=1.0)
    first = backlog.add(A, 4.0, 0.5)
    assert left(backlog, 1.5) == [5.0, 0]
    backlog.done(first, 4.5)
    assert left(backlog, 5.5) == [1.0, 0], "its own two seconds, one of which has passed"


@pytest.mark.parametrize("joins", [1.0, 9.0])
def test_one_that_was_loaded_and_comes_in_the_middle_of_anothers_prefill_does_not_shorten_that(joins: float) -> None:
    backlog = watching()
    long = backlog.add(A, 5.0, 0.0)
    loaded = backlog.add(A, 0.1, 0.0, joins=joins)
    assert backlog.done(loaded, 4.0) is not None
    assert backlog.done(long, 5.0) == 5.0
    after = backlog.add(A, 1.0, 5.0)
    assert backlog.done(after, 6.0) == 1.0


@pytest.mark.parametrize("way", ["done", "drop", "forget"])
def test_one_that_ends_before_it_would_join_never_does(way: str) -> None:
    backlog = watching()
    early = backlog.add(A, 2.0, 0.0, joins=10.0)
    if way == "done":
        assert backlog.done(early, 3.0) == 3.0
    elif way == "drop":
        backlog.drop(early, 3.0)
    else:
        backlog.forget(A)
        backlog.watch(A)
    assert left(backlog, 11.0) == [0, 0]
    assert backlog.done(early, 11.0) is None


def test_the_busy_are_counted() -> None:
    backlog = watching()
    assert backlog.busy(BOTH, 0.0) == 0
    backlog.add(A, 1.0, 0.0)
    assert backlog.busy(BOTH, 0.0) == 0.5
    backlog.add(B, 1.0, 0.0)
    assert backlog.busy(BOTH, 0.0) == 1.0
    assert backlog.busy(RankSet([]), 0.0) == 0


def test_strangers_have_nothing_before_them_and_get_nothing() -> None:
    backlog = watching(A)
    backlog.add(A, 1.0, 0.0)
    assert backlog.seconds(RankSet([STRANGER, A]), np.ones(2), 0.0).tolist() == [0.0, 1.0]
    with pytest.raises(KeyError):
        backlog.add(STRANGER, 1.0, 0.0)


def test_what_a_forgotten_rank_still_had_ends_without_effect_on_who_got_its_place() -> None:
    backlog = watching(A)
    old = backlog.add(A, 9.0, 0.0)
    backlog.forget(A)
    backlog.forget(A)
    backlog.watch(B)
    new = backlog.add(B, 1.0, 0.0)
    assert old.place == new.place
    assert backlog.done(old, 0.5) is None
    assert left(backlog, 0.5) == [0, 0.5]


def test_there_is_room_for_every_rank() -> None:
    ranks = [rank(f"{number:03}") for number in range(100)]
    backlog = Backlog()
    for number, each in enumerate(ranks):
        backlog.watch(each)
        backlog.add(each, number + 1.0, 0.0)
    assert backlog.seconds(RankSet(ranks), np.ones(100), 0.0).tolist() == [number + 1.0 for number in range(100)]
    assert backlog.seconds(RankSet([STRANGER]), np.ones(1), 0.0).tolist() == [0.0]


def shared() -> tuple[Backlog, Backlog]:
    """Of two router processes, over one table."""
    tables = np.zeros((2, BACKLOG_ROWS, 3), np.int64)
    one, other = (Backlog(SharedTable(tables, own, [A, B].index, lambda _: None)) for own in (0, 1))
    for each in (A, B):
        one.watch(each)
    for each in (B, A):
        other.watch(each)
    return one, other


@pytest.mark.parametrize("turn", [1, -1])
def test_processes_see_the_sum_of_theirs(turn: int) -> None:
    """Whichever of them was the first to send something."""
    one, other = shared()[::turn]
    mine = one.add(A, 2.0, 0.0)
    other.add(A, 1.0, 0.5)
    other.add(B, 4.0, 0.5)
    for each in (one, other):
        assert left(each, 1.0) == [2.0, 3.5]  # only the oldest of a rank is under way
        assert each.busy(BOTH, 1.0) == 1.0
    one.done(mine, 2.0)
    for each in (one, other):
        assert left(each, 2.0) == [0.5, 2.5]


def test_a_process_that_starts_again_leaves_what_others_have() -> None:
    one, other = shared()
    one.add(A, 2.0, 0.0)
    other.add(A, 1.0, 0.0)
    one.forget(A)
    one.watch(A)
    assert left(one, 0.0) == left(other, 0.0) == [1.0, 0]


works = st.integers(1, 4_000_000).map(lambda micro: micro / 1e6)


class Lines(RuleBasedStateMachine):
    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.backlog = watching()
        self.now = 50.0
        self.lines: dict[WorkerRank, list[Entry]] = {A: [], B: []}
        self.since = {A: 0.0, B: 0.0}
        """When the first in line came to be first."""

    @rule(target=entries, of=st.sampled_from([A, B]), work=works)
    def add(self, of: WorkerRank, work: float) -> Entry:
        entry = self.backlog.add(of, work, self.now)
        self.lines[of].append(entry)
        if len(self.lines[of]) == 1:
            self.since[of] = self.now
        return entry

    @rule(entry=entries, heard=st.booleans())
    def end(self, entry: Entry, heard: bool) -> None:
        """Perhaps not for the first time."""
        of = A if any(each is entry for each in self.lines[A]) else B
        known = any(each is entry for each in self.lines[of])
        took = self.backlog.done(entry, self.now) if heard else None
        if heard:
            assert (took is not None) == known
            assert took is None or 0 <= took <= self.now - entry.sent
        else:
            self.backlog.drop(entry, self.now)
        if known:
            if self.lines[of][0] is entry:
                self.since[of] = self.now
            self.lines[of] = [each for each in self.lines[of] if each is not entry]

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(of=st.sampled_from([A, B]))
    def restart(self, of: WorkerRank) -> None:
        self.backlog.forget(of)
        self.backlog.watch(of)
        self.lines[of] = []

    @invariant()
    def seconds_are_the_models(self) -> None:
        found = self.backlog.seconds(BOTH, np.array([1.0, 2.0]), self.now).tolist()
        for each, factor, seconds in zip((A, B), (1.0, 2.0), found, strict=True):
            expected = sum(entry.work for entry in self.lines[each]) * factor
            if self.lines[each]:
                head = self.lines[each][0].work * factor
                expected += abs(head - (self.now - self.since[each])) - head
            assert seconds == pytest.approx(expected, abs=1e-4)


TestLinesAgainstModel = Lines.TestCase
TestLinesAgainstModel.settings = settings(repeatable, max_examples=examples(100), stateful_step_count=30)
