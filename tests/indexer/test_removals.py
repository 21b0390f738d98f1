from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import SequenceHashes
from indexer.removals import KEPT, Removals
from indexer.types import WorkerRank

RANK, OTHER = WorkerRank("w", 0), WorkerRank("w", 1)


def hashes(*values: int) -> SequenceHashes:
    return np.array(values, np.uint64)


def since(removals: Removals, position: int, rank: WorkerRank = RANK) -> list[int] | None:
    found = removals.since(rank, position)
    return None if found is None else found.tolist()


def test_what_was_dropped_since_a_moment_is_told_rank_by_rank() -> None:
    removals = Removals()
    assert (removals.position(RANK), since(removals, 0)) == (0, [])
    removals.note(RANK, hashes(1, 2))
    moment = removals.position(RANK)
    removals.note(RANK, hashes(3))
    removals.note(OTHER, hashes(9))
    assert since(removals, moment) == [3]
    assert since(removals, 0) == [1, 2, 3]
    assert since(removals, 0, OTHER) == [9]


def test_what_is_too_long_ago_is_not_known() -> None:
    removals = Removals(kept=3)
    for value in range(5):
        removals.note(RANK, hashes(value))
    assert since(removals, 1) is None
    assert since(removals, 2) == [2, 3, 4]


def test_one_batch_larger_than_all_that_is_kept_is_forgotten_whole() -> None:
    removals = Removals(kept=3)
    removals.note(RANK, hashes(*range(9)))
    assert since(removals, 0) is None
    assert since(removals, removals.position(RANK)) == []


def test_one_batch_larger_than_all_before_it_adds_to_that() -> None:
    """As where an engine evicts for one long prompt what it dropped in a minute."""
    removals = Removals(kept=1000)
    removals.note(RANK, hashes(*range(60)))
    removals.note(RANK, hashes(*range(60, 600)))
    assert since(removals, 0) == list(range(600))


def test_of_a_rank_that_was_cleared_or_has_left_nothing_before_is_known() -> None:
    removals = Removals()
    removals.note(RANK, hashes(1))
    moment = removals.position(RANK)
    removals.forget(RANK)
    assert since(removals, moment) is None
    assert since(removals, removals.position(RANK)) == []
    removals.drop(RANK)
    assert since(removals, moment) is None


def test_it_takes_what_is_promised_however_little_is_dropped_at_a_time() -> None:
    """Engines with a full cache drop a block or a few with each step."""
    removals = Removals()
    events = [np.arange(at, at + 1, dtype=np.uint64).tobytes() for at in range(2 * KEPT)]
    tracemalloc.start()
    for event in events:
        removals.note(RANK, np.frombuffer(bytearray(event), np.uint64))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert since(removals, KEPT) == list(range(KEPT, 2 * KEPT))
    assert taken < 1.5 * 8 * KEPT


@given(st.lists(st.integers(0, 9) | st.none()), st.integers(1, 100))
def test_it_knows_the_last_of_what_was_dropped(sizes: list[int | None], kept: int) -> None:
    """None: everything."""
    removals, dropped, known = Removals(kept), list[int | None](), 0
    for size in sizes:
        if size is None:
            removals.forget(RANK)
            dropped.append(None)
            known = len(dropped)
        else:
            new = list(range(len(dropped), len(dropped) + size))
            removals.note(RANK, hashes(*new))
            dropped += new
        assert removals.position(RANK) == len(dropped)
    known = max(known, len(dropped) - kept)
    for position in range(len(dropped) + 1):
        assert since(removals, position) == (dropped[position:] if position >= known else None)
