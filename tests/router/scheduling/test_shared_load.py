"""Books kept together: what one process books, each sees at once, and a lost process's bookings go with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.events import LoadReport
from indexer.types import RankSet, WorkerRank
from router.scheduling.figures import LOAD_ROWS
from router.scheduling.load import Load, LoadBook, SharedTable
from tests.router.scheduling.candidates import rank, repeatable

RANKS = [rank("a"), rank("a", 1), rank("b")]
UNKNOWN = rank("c")


def place_of(of: WorkerRank) -> int:
    return "abc".index(of.worker_id) * 4 + of.dp_rank


def books(processes: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], list[LoadBook]]:
    """Each watches the ranks in another order, as they come up."""
    tables = np.zeros((processes, LOAD_ROWS, 13), np.int64)
    made = [LoadBook(SharedTable(tables, own, place_of, lambda _: None)) for own in range(processes)]
    for number, book in enumerate(made):
        for each in RANKS[number % 3 :] + RANKS[: number % 3]:
            book.watch(each, 16)
    return tables, made


bookings = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 100), st.integers(0, 100), st.booleans()),
    max_size=12,
)


@repeatable
@given(bookings)
def test_all_see_the_same_and_it_is_the_sum_of_all(made: list[tuple[int, int, int, int, bool]]) -> None:
    _, processes = books(3)
    expected = {each: Load() for each in RANKS}
    for process, number, prefill, cached, ends in made:
        each = RANKS[number]
        reservation = processes[process].reserve(each, prefill, prefill + cached)
        if ends:
            reservation.release()
        else:
            old = expected[each]
            expected[each] = Load(old.requests + 1, old.prefill_tokens + prefill, old.active_tokens + prefill + cached)
    asked = RankSet([*RANKS, UNKNOWN])
    for book in processes:
        assert {each: book.load(each, 0.0) for each in RANKS} == expected
        loads = book.loads(asked, 0.0)
        assert [Load(*map(int, figures)) for figures in zip(*loads[:3], strict=True)] == [*expected.values(), Load()]


def test_sequences_of_all_processes_count() -> None:
    _, (one, other) = books(2)
    one.reserve(RANKS[0], 0, 64, None, 3)
    other.reserve(RANKS[0], 0, 64, None, 1)
    for book in (one, other):
        book.on_report(LoadReport("a", 0, 1, 0, True, request_active_slots=6), 5.0)
        assert (book.load(RANKS[0], 5.0).requests, book.own_requests()) == (6, 2)


def test_what_another_process_booked_is_no_stranger() -> None:
    _, (one, other) = books(2)
    reservation = other.reserve(RANKS[0], 0, 64)
    for book in (one, other):
        book.on_report(LoadReport("a", 0, 1, 0, True, request_active_slots=3, kv_active_blocks=10), 5.0)
        assert book.load(RANKS[0], 5.0) == Load(3, 0, 160)
    reservation.release()
    assert [book.load(RANKS[0], 5.0) for book in (one, other)] == [Load(2, 0, 96)] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_what_another_process_had_until_the_report_is_no_stranger_whoever_has_it_first(first: int) -> None:
    """The engine was asked while all ran, and they have ended since."""
    _, processes = books(2)
    for reservation in [processes[0].reserve(RANKS[0], 0, 160) for _ in range(5)]:
        reservation.release()
    report = LoadReport("a", 0, 1, 0, True, request_active_slots=5, kv_active_blocks=50)
    for book in (processes[first], processes[1 - first]):
        book.on_report(report, 1.0)
    assert [book.load(RANKS[0], 1.0) for book in processes] == [Load()] * 2


def test_a_lost_process_leaves_nothing_behind() -> None:
    tables, (one, other) = books(2)
    one.reserve(RANKS[0], 10, 20)
    other.reserve(RANKS[0], 1, 2)
    tables[0] = 0  # as the parent does
    assert other.load(RANKS[0], 0.0) == Load(1, 1, 2)
