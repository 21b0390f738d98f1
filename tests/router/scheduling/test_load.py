"""The load book against a plain model: whatever happens in between, the own load ends at zero."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from indexer.events import LoadReport
from indexer.types import RankSet, WorkerRank
from router.scheduling.decision import UNBOUNDED
from router.scheduling.figures import LOAD_ROWS
from router.scheduling.load import REPORT_LIFE, Load, LoadBook, Metrics, Reservation, SharedTable
from tests.examples import examples
from tests.router.scheduling.candidates import rank, repeatable

A, B = rank("a"), rank("b", 1)
OTHERS = [rank(f"other {number}") for number in range(20)]
"""More than a book has room for at first."""
STRANGER = rank("stranger")
EVERYBODY = RankSet([B, STRANGER, *OTHERS, A])
SOME = [A, B, OTHERS[0], OTHERS[-1]]
BLOCK = 16
counts = st.none() | st.integers(0, 20)


def report(
    of: WorkerRank = A, *, running: int | None = None, waiting: int | None = None, blocks: int | None = None
) -> LoadReport:
    return LoadReport(
        of.worker_id,
        of.dp_rank,
        1,
        0,
        True,
        request_active_slots=running,
        num_requests_waiting=waiting,
        kv_active_blocks=blocks,
    )


def watching(*ranks: WorkerRank) -> LoadBook:
    book = LoadBook()
    for each in ranks or (A,):
        book.watch(each, BLOCK)
    return book


def loads_of(book: LoadBook, ranks: RankSet, now: float) -> list[Load]:
    columns = [figures.tolist() for figures in book.loads(ranks, now)[: len(Load._fields)]]
    return [Load(*figures) for figures in zip(*columns, strict=True)]


@dataclass
class Booked:
    """What one reservation should amount to."""

    reservation: Reservation
    prefill: int
    active: int
    sequences: int
    live: bool = True

    def load(self) -> Load:
        return Load(self.sequences, self.prefill, self.active) if self.live else Load()


@dataclass
class Ledger:
    """The model of one rank since it was last watched anew."""

    block_size: int = BLOCK
    booked: list[Booked] = field(default_factory=list)
    foreign: tuple[int, int] = (0, 0)
    most: Load = field(default_factory=Load)
    """The own load at its highest, figure by figure, since the last report."""
    reported_at: float = float("-inf")
    told: bool = False
    """Whether that report had figures."""

    def own(self) -> Load:
        loads = [booked.load() for booked in self.booked]
        return Load(*(sum(figures) for figures in zip(*loads, strict=True))) if loads else Load()

    def load(self, now: float) -> Load:
        own = self.own()
        requests, tokens = (0, 0) if now - self.reported_at > REPORT_LIFE else self.foreign
        return Load(own.requests + requests, own.prefill_tokens, own.active_tokens + tokens)


class Books(RuleBasedStateMachine):
    booked = Bundle("booked")

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.now = 1000.0
        self.all: list[Booked] = []

    @initialize()
    def watch_both(self) -> None:
        self.ledgers = {A: Ledger(), B: Ledger()}
        for each in self.ledgers:
            self.book.watch(each, BLOCK)

    @rule(
        of=st.sampled_from(SOME),
        prefill=st.integers(0, 100),
        cached=st.integers(0, 100),
        further=st.integers(0, 3),
        target=booked,
    )
    def reserve(self, of: WorkerRank, prefill: int, cached: int, further: int) -> Booked:
        if of not in self.ledgers:
            self.watch(of, BLOCK)
        reservation = self.book.reserve(of, prefill, prefill + cached, None, further)
        booked = Booked(reservation, prefill, prefill + cached, 1 + further)
        self.ledgers[of].booked.append(booked)
        self.all.append(booked)
        return booked

    @rule(booked=booked)
    def first_token(self, booked: Booked) -> None:
        booked.reservation.first_token()
        booked.prefill = 0

    @rule(booked=booked, tokens=st.integers(0, 50))
    def generated(self, booked: Booked, tokens: int) -> None:
        booked.reservation.generated(tokens)
        booked.active += tokens

    @rule(booked=booked)
    def release(self, booked: Booked) -> None:
        booked.reservation.release()
        booked.live = False

    @rule(of=st.sampled_from(SOME), running=counts, waiting=counts, blocks=counts)
    def report(self, of: WorkerRank, running: int | None, waiting: int | None, blocks: int | None) -> None:
        self.book.on_report(report(of, running=running, waiting=waiting, blocks=blocks), self.now)
        if of in self.ledgers:
            ledger = self.ledgers[of]
            if (running, waiting, blocks) == (None, None, None) and ledger.told:
                return
            ledger.told = (running, waiting, blocks) != (None, None, None)
            own = ledger.own()
            requests = max(0, (running or 0) + (waiting or 0) - ledger.most.requests)
            tokens = max(0, (blocks or 0) * ledger.block_size - ledger.most.active_tokens) if requests else 0
            ledger.foreign, ledger.reported_at, ledger.most = (requests, tokens), self.now, own

    @rule(seconds=st.sampled_from([0.5, REPORT_LIFE, REPORT_LIFE + 0.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(of=st.sampled_from(SOME))
    def forget(self, of: WorkerRank) -> None:
        self.book.forget(of)
        self.ledgers.pop(of, None)

    @rule()
    def others_come(self) -> None:
        for each in OTHERS:
            self.watch(each, BLOCK)

    @rule()
    def others_go(self) -> None:
        for each in OTHERS:
            self.forget(each)

    @rule(of=st.sampled_from(SOME), block_size=st.sampled_from([BLOCK, 32]))
    def watch(self, of: WorkerRank, block_size: int) -> None:
        self.book.watch(of, block_size)
        ledger = self.ledgers.setdefault(of, Ledger())
        ledger.block_size, ledger.told = block_size, False  # the report before may have been another engine's

    @invariant()
    def loads_are_the_models(self) -> None:
        for ledger in self.ledgers.values():
            ledger.most = Load(*map(max, zip(ledger.most, ledger.own(), strict=True)))
        expected = [self.ledgers[each].load(self.now) if each in self.ledgers else Load() for each in EVERYBODY.ranks]
        assert [self.book.load(each, self.now) for each in EVERYBODY.ranks] == expected
        for ranks in (EVERYBODY, RankSet(EVERYBODY.ranks)):  # one that is known from before, and one that is not
            assert loads_of(self.book, ranks, self.now) == expected
        assert self.book.own_requests() == sum(booked.live for booked in self.all)
        assert {each: found.load for each, found in self.book.get_metrics(self.now).items()} == {
            each: ledger.load(self.now) for each, ledger in self.ledgers.items()
        }

    def teardown(self) -> None:
        for booked in self.all:
            booked.reservation.release()
        self.now += 2 * REPORT_LIFE
        assert set(loads_of(self.book, EVERYBODY, self.now)) == {Load()}


TestBooksAgainstModel = Books.TestCase
TestBooksAgainstModel.settings = settings(repeatable, max_examples=examples(100), stateful_step_count=30)


def test_a_booking_from_its_first_to_its_last_moment() -> None:
    book = watching()
    reservation = book.reserve(A, 60, 100)
    assert book.load(A, 0) == Load(1, 60, 100)
    reservation.first_token()
    reservation.first_token()
    assert book.load(A, 0) == Load(1, 0, 100)
    reservation.generated(3)
    assert book.load(A, 0) == Load(1, 0, 103)
    reservation.release()
    assert book.load(A, 0) == Load()
    reservation.release()
    reservation.generated(5)
    reservation.first_token()
    assert book.load(A, 0) == Load()


def test_foreign_load_is_what_was_reported_less_what_was_ours_then() -> None:
    book = watching()
    first = book.reserve(A, 0, 64)
    book.on_report(report(running=3, waiting=2, blocks=10), 5.0)
    assert book.load(A, 5.0) == Load(1 + 4, 0, 64 + 96)
    book.reserve(A, 10, 20)
    assert book.load(A, 5.0) == Load(2 + 4, 10, 84 + 96)
    first.release()
    assert book.load(A, 5.0) == Load(1 + 4, 10, 20 + 96)


def test_each_sequence_of_a_request_counts_as_engines_count_them() -> None:
    book = watching()
    several = book.reserve(A, 10, 20, None, 7)
    assert book.load(A, 0.0) == Load(8, 10, 20)
    assert (book.own_requests(), book.booked(A)) == (1, 1)
    book.on_report(report(running=6, waiting=2), 1.0)
    assert book.load(A, 1.0) == Load(8, 10, 20)
    several.release()
    assert (book.load(A, 1.0), book.own_requests()) == (Load(), 0)
    book.on_report(report(running=8), 2.0)  # asked for before it ended
    assert book.load(A, 2.0) == Load()


def test_a_report_that_is_smaller_than_our_own_load_takes_nothing_away() -> None:
    book = watching()
    book.reserve(A, 0, 640)
    book.reserve(A, 0, 640)
    book.on_report(report(running=1, blocks=1), 0.0)
    assert book.load(A, 0.0) == Load(2, 0, 1280)


def test_blocks_without_foreign_requests_are_no_load() -> None:
    """Rounding up to whole blocks, and blocks of requests that just ended."""
    book = watching()
    book.reserve(A, 0, 10)
    book.on_report(report(running=1, blocks=100), 0.0)
    assert book.load(A, 0.0) == Load(1, 0, 10)


@pytest.mark.parametrize(("age", "requests"), [(0.0, 4), (REPORT_LIFE, 4), (REPORT_LIFE + 0.001, 0)])
def test_a_report_expires(age: float, requests: int) -> None:
    book = watching()
    book.on_report(report(running=4), 100.0)
    assert book.load(A, 100.0 + age) == Load(requests)
    metrics = book.get_metrics(100.0 + age)[A]
    assert metrics.load == Load(requests)
    assert metrics.age == pytest.approx(age)
    assert metrics.report == report(running=4)


def test_of_one_rank_there_is_as_much_to_tell_without_a_look_at_the_others() -> None:
    book = watching(A)
    book.on_report(report(running=4), 100.0)
    assert book.metrics(A, 101.0) == book.get_metrics(101.0)[A]
    assert book.metrics(B, 101.0) is None


def test_slots_are_as_many_as_were_reported_until_the_rank_is_forgotten() -> None:
    book, both = watching(A, B), RankSet([A, B])
    book.on_report(msgspec.structs.replace(report(), request_total_slots=16), 0.0)
    book.on_report(report(), 1.0)
    assert book.loads(both, 100.0).slots.tolist() == [16, UNBOUNDED]
    book.forget(A)
    book.watch(A, BLOCK)
    assert book.loads(both, 100.0).slots.tolist() == [UNBOUNDED] * 2


def test_the_limits_of_an_engine_that_was_replaced_do_not_hold_for_the_next_one() -> None:
    """SGLang tells how many requests it runs at a time; vLLM, started in its place, does not."""
    book, rank_set = watching(A), RankSet([A])
    told = report(running=0, waiting=0)
    book.on_report(msgspec.structs.replace(told, request_total_slots=16, kv_total_blocks=100), 0.0)
    book.watch(A, BLOCK)
    book.on_report(told, 1.0)
    loads = book.loads(rank_set, 1.0)
    assert (loads.slots.tolist(), loads.capacity_tokens.tolist()) == ([UNBOUNDED], [UNBOUNDED])


def full(*, running: int = 4, waiting: int = 2, blocks: int = 90) -> LoadReport:
    """Of an engine that runs at most 16 requests, in 100 blocks."""
    told = report(running=running, waiting=waiting, blocks=blocks)
    return msgspec.structs.replace(told, request_total_slots=16, kv_total_blocks=100)


def slots_of(book: LoadBook, now: float) -> int:
    return int(book.loads(RankSet([A]), now).slots[0])


def test_an_engine_without_memory_for_one_more_runs_no_more_than_it_runs() -> None:
    book = watching()
    for _ in range(6):
        book.reserve(A, 15 * BLOCK, 15 * BLOCK)
    book.on_report(full(), 0.0)
    assert slots_of(book, 0.0) == 4
    book.on_report(full(waiting=0), 1.0)
    assert slots_of(book, 1.0) == 16


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        (full(blocks=80), 15 * BLOCK),  # one more fits
        (full(), 9 * BLOCK),  # those that wait are short
        (full(running=0), 15 * BLOCK),  # it has just begun
        (full(), None),  # others send what it has, and tell us nothing of it
    ],
)
def test_requests_that_wait_at_an_engine_with_memory_wait_for_something_else(
    told: LoadReport, tokens: int | None
) -> None:
    book = watching()
    if tokens:
        book.reserve(A, tokens, tokens)
    book.on_report(told, 0.0)
    assert slots_of(book, 0.0) == 16


def test_that_an_engine_has_no_memory_is_known_as_long_as_its_report_is_valid() -> None:
    book = watching(A, B)
    for _ in range(3):
        book.reserve(A, 30 * BLOCK, 30 * BLOCK)
    book.on_report(full(running=1), 100.0)  # it has, and uses, just what we sent it
    book.on_report(report(B, running=3), 95.0)
    assert slots_of(book, 106.0) == 1
    assert slots_of(book, 100.0 + REPORT_LIFE) == 1
    assert slots_of(book, 100.5 + REPORT_LIFE) == 16


def test_an_engine_that_does_not_tell_for_a_moment_has_the_load_that_it_told_last() -> None:
    """One that is overloaded may not answer in time when it is asked."""
    book = watching()
    told = report(running=4, blocks=50)
    book.on_report(told, 100.0)
    for second in range(1, 12):
        book.on_report(report(), 100.0 + second)
        valid = second <= REPORT_LIFE
        assert book.load(A, 100.0 + second) == (Load(4, 0, 50 * BLOCK) if valid else Load())
        memory = book.loads(RankSet([A]), 100.0 + second).memory_tokens.tolist()
        assert memory == [50 * BLOCK if valid else 0]
        assert book.get_metrics(100.0 + second)[A][1:] == (told, second)
    book.on_report(report(running=0, blocks=0), 112.0)
    assert book.load(A, 112.0) == Load()


def test_an_engine_that_never_tells_its_load_is_reported_of_all_the_same() -> None:
    book = watching()
    for second in (100.0, 120.0):
        book.on_report(report(), second)
        assert book.get_metrics(second)[A] == (Load(), report(), 0.0)


def test_metrics_without_a_report_have_no_age() -> None:
    assert watching(A).get_metrics(7.0) == {A: (Load(), None, None)}


def test_an_unknown_rank_has_no_load_and_its_reports_are_dropped() -> None:
    book = watching()
    book.on_report(report(B, running=4), 0.0)
    assert book.load(B, 0.0) == Load()
    assert set(book.get_metrics(0.0)) == {A}


def test_a_rank_that_comes_back_starts_from_nothing_while_old_bookings_end_in_peace() -> None:
    book = watching()
    old = book.reserve(A, 10, 20)
    book.forget(A)
    book.watch(A, BLOCK)
    new = book.reserve(A, 1, 2)
    old.generated(4)
    old.first_token()
    old.release()
    assert book.load(A, 0.0) == Load(1, 1, 2)
    new.release()
    assert book.load(A, 0.0) == Load()


def test_watching_again_keeps_bookings_and_takes_the_new_block_size() -> None:
    book = watching()
    book.reserve(A, 10, 20)
    book.watch(A, 32)
    assert book.load(A, 0.0) == Load(1, 10, 20)
    book.on_report(report(running=2, blocks=2), 0.0)
    assert book.load(A, 0.0) == Load(2, 10, 64)


def test_an_engine_that_tells_nothing_is_not_reported_of_as_the_one_before_it() -> None:
    book = watching()
    book.on_report(report(running=2, blocks=2), 0.0)
    book.watch(A, 16)
    found = book.metrics(A, 0.0)
    assert found
    assert (found.report, found.age) == (None, None)
    silent = report()
    book.on_report(silent, 20.0)
    assert book.metrics(A, 21.0) == Metrics(Load(), silent, 1.0)


def test_a_request_that_has_just_ended_does_not_come_back_as_a_stranger() -> None:
    book = watching()
    book.reserve(A, 100, 100).release()
    book.on_report(report(running=1, blocks=7), now=1)  # it was asked for while the request still ran
    assert book.load(A, 1) == Load()
    book.on_report(report(running=1, blocks=7), now=2)
    assert book.load(A, 2) == Load(1, 0, 7 * BLOCK)


def test_a_book_grows_and_keeps_what_is_written_there() -> None:
    ranks = [rank(f"{number:03}") for number in range(100)]
    book, known = LoadBook(), RankSet(ranks)
    reservations = []
    for number, each in enumerate(ranks):
        book.watch(each, BLOCK)
        reservations.append(book.reserve(each, number, 2 * number))
        book.on_report(report(each, running=3, blocks=1000), 0.0)
        assert loads_of(book, known, 0.0)[: number + 1] == [
            Load(3, n, 2 * n + (1000 * BLOCK - 2 * n)) for n in range(number + 1)
        ]
        assert set(loads_of(book, known, 0.0)[number + 1 :]) <= {Load()}
    for reservation in reservations:
        reservation.release()
    assert set(loads_of(book, known, REPORT_LIFE + 1)) == {Load()}


def test_unknown_ranks_read_as_nothing_wherever_they_stand() -> None:
    book = watching(A, B)
    book.reserve(A, 1, 2)
    book.reserve(B, 3, 4)
    ranks = RankSet([STRANGER, B, STRANGER, A])
    assert loads_of(book, ranks, 0.0) == [Load(), Load(1, 3, 4), Load(), Load(1, 1, 2)]
    assert loads_of(book, RankSet([]), 0.0) == []
    assert loads_of(LoadBook(), ranks, 0.0) == [Load()] * 4


def test_a_rank_becomes_known_in_sets_that_were_asked_for_before() -> None:
    book, ranks = watching(A), RankSet([A, B])
    book.reserve(A, 1, 2)
    assert loads_of(book, ranks, 0.0) == [Load(1, 1, 2), Load()]
    book.watch(B, BLOCK)
    book.reserve(B, 3, 4)
    assert loads_of(book, ranks, 0.0) == [Load(1, 1, 2), Load(1, 3, 4)]
    book.forget(A)
    assert loads_of(book, ranks, 0.0) == [Load(), Load(1, 3, 4)]


def test_nobody_can_reserve_where_nothing_is_watched() -> None:
    book = watching(A)
    for stranger in (B, STRANGER):
        with pytest.raises(KeyError):
            book.reserve(stranger, 1, 1)


def test_a_forgotten_ranks_place_is_used_again_only_when_its_last_booking_has_ended() -> None:
    book = watching(A)
    bookings = [book.reserve(A, 5, 10) for _ in range(2)]
    book.on_report(report(running=9, blocks=99), 0.0)
    book.forget(A)
    book.watch(B, BLOCK)
    assert loads_of(book, RankSet([A, B]), 0.0) == [Load(), Load()]
    assert book._places._high == 2
    bookings[0].release()
    bookings[1].generated(3)
    book.watch(A, BLOCK)  # as another, while the old one still has a booking
    assert loads_of(book, RankSet([A, B]), 0.0) == [Load(), Load()]
    assert book._places._high == 3
    bookings[1].release()
    book.watch(STRANGER, BLOCK)
    assert book._places._high == 3, "the place that came free is taken"
    assert book.load(STRANGER, 0.0) == Load()


def test_workers_that_come_and_go_do_not_make_the_book_grow() -> None:
    book = LoadBook()
    for number in range(500):
        each = rank(f"{number}")
        book.watch(each, BLOCK)
        booking = book.reserve(each, 1, 1)
        book.on_report(report(each, running=4, blocks=7), float(number))
        book.forget(each)
        booking.release()
    assert (book._places._high, len(book._reported_at)) == (1, 17)
    assert not book._reports
    assert not book._retired


def test_reports_expire_one_by_one() -> None:
    book = watching(A, B)
    ranks = RankSet([A, B])
    book.on_report(report(A, running=1), 0.0)
    book.on_report(report(B, running=2), 5.0)
    assert loads_of(book, ranks, REPORT_LIFE) == [Load(1), Load(2)]
    assert loads_of(book, ranks, REPORT_LIFE + 1) == [Load(), Load(2)]
    book.on_report(report(A, running=3), REPORT_LIFE + 2)
    assert loads_of(book, ranks, REPORT_LIFE + 5.5) == [Load(3), Load()]
    assert loads_of(book, ranks, 2 * REPORT_LIFE + 2.5) == [Load(), Load()]


def shared(held: Counter[int] | None = None) -> LoadBook:
    """Of one process alone, in which ranks a and b have places of their own for ever. `held`: how often it has each."""
    held = Counter() if held is None else held

    def claim(rank: WorkerRank) -> int:
        place = [A, B].index(rank)
        held[place] += 1
        return place

    def release(place: int) -> None:
        held[place] -= 1

    return LoadBook(SharedTable(np.zeros((1, LOAD_ROWS, 3), np.int64), 0, claim, release))


def test_a_rank_that_comes_back_to_its_place_keeps_what_is_reported_of_it_then() -> None:
    """In shared books, when a booking from before ends."""
    book = shared()
    book.watch(A, BLOCK)
    old = book.reserve(A, 5, 10)
    book.forget(A)
    book.watch(A, BLOCK)
    book.on_report(report(running=4, blocks=10), 1.0)
    old.release()
    assert book.load(A, 1.0) == Load(3, 0, 150)


def test_a_rank_that_comes_back_to_its_place_has_no_load_from_reports_before() -> None:
    book = shared()
    book.watch(A, BLOCK)
    book.on_report(report(running=4, blocks=10), 1.0)
    booking = book.reserve(A, 5, 10)
    book.forget(A)
    book.watch(A, BLOCK)
    assert book.load(A, 1.0) == Load(1, 5, 10)
    booking.release()
    assert book.load(A, 1.0) == Load()


def test_a_shared_place_is_held_once_while_a_rank_or_a_booking_needs_it() -> None:
    held = Counter[int]()
    book = shared(held)
    for _ in range(10):
        book.watch(A, BLOCK)
        book.watch(A, BLOCK)
        assert held[0] == 1
        book.forget(A)
        assert held[0] == 0
    book.watch(A, BLOCK)
    booking = book.reserve(A, 5, 10)
    book.forget(A)
    assert held[0] == 1
    book.watch(A, BLOCK)
    assert held[0] == 1
    booking.release()
    assert held[0] == 1
    book.forget(A)
    assert held[0] == 0


def test_what_a_report_had_too_little_is_not_owed_when_its_request_has_ended() -> None:
    """The engine had not begun yet, so memory was below what was booked; no rank can hold less than nothing."""
    book = watching(A)
    reservation = book.reserve(A, 100, 100)
    book.on_report(report(running=1, blocks=0), 0.0)
    assert book.loads(RankSet([A]), 0.0).memory_tokens.tolist() == [0]
    reservation.release()
    assert book.loads(RankSet([A]), 0.0).memory_tokens.tolist() == [0]
