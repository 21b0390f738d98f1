"""Who has waited for too long, and who is sick."""

from __future__ import annotations

from typing import Literal, cast

import pytest

from router.http.pool import Pool
from router.proxy.exchange import Exchange
from router.proxy.outcome import Silence
from router.proxy.watchdog import Timeouts, Watchdog
from router.workers.spec import parse_worker
from router.workers.worker import Worker

NEVER = Timeouts(None, None, None, None)


class Waiting:
    """An exchange as `Watchdog` sees it."""

    def __init__(self, worker: Worker, *, streamed: bool = True, began: float = 0.0) -> None:
        self.worker = worker
        self.streamed = streamed
        self.began = self.since = began
        self.owed: Literal["prefill", "beginning", "rest"] = "beginning"
        self.moved = self.paused = False
        self.ends: list[str] = []

    def silence(self, now: float) -> Silence | None:
        if self.moved:
            self.since = now
        moved, self.moved = self.moved, False
        return None if self.paused else Silence(self.worker, self.since, self.owed, moved)

    def time_out(self, reason: str) -> None:
        self.ends.append(reason)

    def expire(self, limit: float) -> None:
        self.ends.append(f"in all {limit:g}")


class Clock:
    def __init__(self, timeouts: Timeouts, *exchanges: Waiting) -> None:
        self.sick: list[tuple[str, float]] = []
        self.under_way = list(exchanges)
        self.watchdog = Watchdog(timeouts, self._trip, cast("list[Exchange]", self.under_way))
        self.now = 0.0

    def _trip(self, worker: Worker, reason: str, now: float) -> None:
        assert reason
        self.sick.append((worker.id, now))

    def pass_to(self, now: float) -> None:
        while self.now < now:
            self.now += 1
            self.watchdog.tick(self.now)
            self.under_way[:] = [exchange for exchange in self.under_way if not exchange.ends]


@pytest.fixture
def a() -> Worker:
    return _up(Worker(parse_worker("http://a:1,name=a"), Pool("http://a:1", 1.0)))


@pytest.fixture
def b() -> Worker:
    return _up(Worker(parse_worker("http://b:1,name=b"), Pool("http://b:1", 1.0)))


def _up(worker: Worker) -> Worker:
    worker.up = True
    return worker


def test_nothing_is_cut_where_no_limit_is_set(a: Worker) -> None:
    waiting = Waiting(a)
    Clock(NEVER, waiting).pass_to(1000)
    assert waiting.ends == []


@pytest.mark.parametrize(("owed", "limit"), [("beginning", 20), ("rest", 10)])
def test_each_wait_has_its_own_limit(a: Worker, owed: Literal["beginning", "rest"], limit: int) -> None:
    waiting = Waiting(a)
    waiting.owed = owed
    clock = Clock(NEVER._replace(first_byte=20.0, idle=10.0), waiting)
    clock.pass_to(limit)
    assert waiting.ends == []
    clock.pass_to(limit + 1)
    assert waiting.ends == [f"sent nothing for {limit} s"]


def test_each_piece_begins_the_wait_anew(a: Worker) -> None:
    waiting = Waiting(a)
    waiting.owed = "rest"
    clock = Clock(NEVER._replace(idle=10.0), waiting)
    for now in range(9, 100, 9):
        waiting.moved = True
        clock.pass_to(now)
    assert waiting.ends == []


def test_an_answer_that_comes_whole_may_be_long_in_coming(a: Worker) -> None:
    whole, begun = Waiting(a, streamed=False), Waiting(a, streamed=False)
    begun.owed = "rest"
    Clock(NEVER._replace(first_byte=10.0, idle=10.0), whole, begun).pass_to(50)
    assert (len(whole.ends), len(begun.ends)) == (0, 1)


def test_a_prompt_that_is_computed_for_another_has_no_limit_of_an_answer(a: Worker) -> None:
    prefill = Waiting(a)
    prefill.owed = "prefill"
    Clock(NEVER._replace(first_byte=10.0, idle=10.0), prefill).pass_to(50)
    assert prefill.ends == []


def test_a_client_that_does_not_read_is_no_fault_of_the_worker(a: Worker) -> None:
    waiting = Waiting(a)
    waiting.paused, waiting.owed = True, "rest"
    clock = Clock(NEVER._replace(idle=10.0, stall=10.0), waiting)
    clock.pass_to(50)
    assert (waiting.ends, clock.sick) == ([], [])


def test_a_request_has_a_limit_in_all_wherever_it_is(a: Worker) -> None:
    held, busy = Waiting(a), Waiting(a, streamed=False, began=5.0)
    held.paused = True
    clock = Clock(NEVER._replace(request=30.0), held, busy)
    clock.pass_to(31)
    assert (held.ends, busy.ends) == (["in all 30"], [])
    clock.pass_to(36)
    assert busy.ends == ["in all 30"]


# -- no progress

STALL = NEVER._replace(stall=10.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_worker_whose_streams_all_stand_still_is_sick(a: Worker, b: Worker, order: int) -> None:
    stuck, too, whole, other = Waiting(a), Waiting(a, began=3.0), Waiting(a, streamed=False), Waiting(b, began=9.0)
    clock = Clock(STALL, *[stuck, too, whole, other][::order])
    stuck.owed = "rest"
    clock.pass_to(10)
    assert clock.sick == []
    clock.pass_to(11)
    assert clock.sick == [("a", 11.0)]
    assert [len(exchange.ends) for exchange in (stuck, too, whole, other)] == [1, 1, 1, 0]


def test_a_worker_whose_prefills_all_stand_still_is_sick(a: Worker) -> None:
    """The one of an answer that is to come whole, too: it is one token."""
    prefill = Waiting(a, streamed=False)
    prefill.owed = "prefill"
    clock = Clock(STALL, prefill)
    a.pool.ended += 1
    clock.pass_to(10)
    assert clock.sick == []
    clock.pass_to(12)
    assert (clock.sick, len(prefill.ends)) == ([("a", 11.0)], 1)


def test_one_that_moves_speaks_for_all(a: Worker) -> None:
    stuck, moving = Waiting(a), Waiting(a)
    clock = Clock(STALL, stuck, moving)
    for now in range(5, 100, 5):
        moving.moved = True
        clock.pass_to(now)
    assert (clock.sick, stuck.ends) == ([], [])
    clock.pass_to(106)
    assert len(clock.sick) == 1


def test_an_answer_that_came_and_went_between_two_ticks_is_a_sign_too(a: Worker) -> None:
    stuck = Waiting(a)
    clock = Clock(STALL, stuck)
    for now in range(5, 50, 5):
        a.pool.ended += 1
        clock.pass_to(now)
    assert clock.sick == []


def test_new_requests_do_not_hide_a_sick_worker(a: Worker) -> None:
    clock = Clock(STALL, Waiting(a))
    for now in range(1, 12):
        clock.pass_to(now)
        clock.under_way.append(Waiting(a, began=float(now)))
    assert clock.sick == [("a", 11.0)]


def test_what_comes_whole_tells_nothing_of_a_workers_health(a: Worker) -> None:
    clock = Clock(STALL, Waiting(a, streamed=False))
    clock.pass_to(100)
    assert clock.sick == []


def test_what_comes_whole_is_not_awaited_from_a_worker_that_stays_down(a: Worker) -> None:
    """Its process hangs, or its host has gone: nothing breaks the connection."""
    whole = Waiting(a, streamed=False)
    clock = Clock(STALL, whole)
    clock.pass_to(100)
    a.up = False
    clock.pass_to(111)
    assert (clock.sick, whole.ends) == ([], [])
    clock.pass_to(112)
    assert (clock.sick, len(whole.ends)) == ([("a", 112.0)], 1)


def test_what_comes_whole_is_awaited_from_a_worker_that_was_down_for_a_moment(a: Worker) -> None:
    whole = Waiting(a, streamed=False)
    clock = Clock(STALL, whole)
    for now in range(9, 100, 9):
        a.up = False
        clock.pass_to(now)
        a.up = True
        clock.pass_to(now + 1)
    assert (clock.sick, whole.ends) == ([], [])


def test_it_is_judged_anew_after_it_was_idle(a: Worker) -> None:
    first, later = Waiting(a), Waiting(a, began=100.0)
    clock = Clock(STALL, first)
    clock.pass_to(8)
    clock.under_way.clear()
    clock.pass_to(100)
    clock.under_way.append(later)
    clock.pass_to(109)
    assert clock.sick == []
    clock.pass_to(111)
    assert clock.sick == [("a", 111.0)]
