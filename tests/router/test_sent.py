"""What processes on one port tell each other of what they send where."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from numpy.testing import assert_array_equal

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank
from router import sent
from router.columns import RANKS_PER_WORKER, Columns
from router.sent import SentPrompts

COLUMNS = Columns(["a", "b"])
A, B = WorkerRank("a", 0), WorkerRank("b", RANKS_PER_WORKER - 1)


Rings = npt.NDArray[np.uint64]


@pytest.fixture
def rings() -> Rings:
    return np.zeros((3, 64), np.uint64)


def chain(*blocks: int) -> SequenceHashes:
    return np.array(blocks, np.uint64)


def heard(process: SentPrompts) -> list[tuple[WorkerRank, list[int], bool]]:
    return [(rank, blocks.tolist(), guessed) for rank, blocks, guessed in process.news()]


def test_each_hears_once_what_the_others_told(rings: Rings) -> None:
    first, second, third = (SentPrompts(rings, own, COLUMNS) for own in range(3))
    first.tell(A, chain(1, 2, 2**64 - 1), guessed=False)
    second.tell(B, chain(3), guessed=True)
    assert heard(third) == [(A, [1, 2, 2**64 - 1], False), (B, [3], True)]
    assert heard(first) == [(B, [3], True)]
    assert heard(third) == heard(first) == []
    first.tell(B, chain(4), guessed=False)
    assert heard(third) == [(B, [4], False)]


def test_an_empty_chain_tells_nothing(rings: Rings) -> None:
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    first.tell(A, chain(), guessed=False)
    assert heard(second) == []
    first.tell(A, chain(1), guessed=False)
    assert heard(second) == [(A, [1], False)]


def test_of_a_long_prompt_the_beginning_is_told(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "_MOST", 5)
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    first.tell(A, np.arange(10, 20, dtype=np.uint64), guessed=False)
    assert heard(second) == [(A, [10, 11, 12, 13, 14], False)]


@pytest.mark.parametrize("seed", range(5))
def test_rings_wrap(rings: Rings, seed: int) -> None:
    """Records of all lengths, read at any time but before the ring is full, come whole and in order."""
    draw = random.Random(seed)
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    told: list[int] = []
    got: list[int] = []
    for number in range(2000):
        blocks = np.full(draw.randint(1, 18), number, np.uint64)
        first.tell(A, blocks, guessed=False)
        told += blocks.tolist()
        if number % 2 or draw.random() < 0.5:
            got += [block for _, found, _ in heard(second) for block in found]
    got += [block for _, found, _ in heard(second) for block in found]
    assert got == told


def test_whoever_fell_behind_goes_on_from_the_newest(rings: Rings) -> None:
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    for number in range(100):
        first.tell(A, chain(number, number), guessed=False)
    assert heard(second) == []
    first.tell(A, chain(7), guessed=False)
    assert heard(second) == [(A, [7], False)]


def test_a_process_that_starts_again_goes_on_in_its_ring(rings: Rings) -> None:
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    first.tell(A, chain(1), guessed=False)
    again = SentPrompts(rings, 0, COLUMNS)
    second.tell(B, chain(2), guessed=False)
    again.tell(A, chain(3), guessed=False)
    assert heard(second) == [(A, [1], False), (A, [3], False)]
    assert heard(again) == [(B, [2], False)]


@pytest.mark.parametrize(("word", "value"), [(4, 5), (5, 0), (5, 2**63 + 2)])
def test_words_that_came_out_of_order_are_not_believed(rings: Rings, word: int, value: int) -> None:
    first, second = (SentPrompts(rings, own, COLUMNS) for own in range(2))
    first.tell(A, chain(1), guessed=False)
    first.tell(A, chain(2, 3), guessed=False)
    rings[0, word] = value
    assert heard(second) == [(A, [1], False)]
    first.tell(B, chain(4), guessed=False)
    assert heard(second) == [(B, [4], False)]


def test_columns_and_ranks() -> None:
    ranks = [WorkerRank(worker, rank) for worker in "ab" for rank in range(RANKS_PER_WORKER)]
    assert [COLUMNS.rank_at(COLUMNS.of(rank)) for rank in ranks] == ranks
    assert_array_equal(sorted(COLUMNS.of(rank) for rank in ranks), range(len(COLUMNS)))
    with pytest.raises(ValueError, match="beyond the 512 ranks"):
        COLUMNS.of(WorkerRank("a", RANKS_PER_WORKER))
