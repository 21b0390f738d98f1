from __future__ import annotations

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.removals import Removals
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


def test_of_a_rank_that_was_cleared_or_has_left_nothing_before_is_known() -> None:
    removals = Removals()
    removals.note(RANK, hashes(1))
    moment = removals.position(RANK)
    removals.forget(RANK)
    assert since(removals, moment) is None
    assert since(removals, removals.position(RANK)) == []
    removals.drop(RANK)
    assert since(removals, moment) is None
