"""What processes on one port tell each other of what they send where."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank
from router.processes import sent
from router.processes.columns import Columns
from router.processes.sent import SentPrompts

A, B, C = (WorkerRank(*name) for name in (("a", 0), ("b", 511), ("c", 0)))


Rings = npt.NDArray[np.uint64]


@pytest.fixture
def rings() -> Rings:
    return np.zeros((3, 64), np.uint64)


def process(rings: Rings, own: int, ranks: Sequence[WorkerRank] = (A, B)) -> SentPrompts:
    """It knows `ranks` by now."""
    with tempfile.TemporaryFile() as file:
        columns = Columns(np.zeros(4, np.uint64), np.zeros((3, 4), np.int64), own, file.fileno())
        for rank in ranks:
            columns.claim(rank)
    return SentPrompts(rings, own, columns)


def chain(*blocks: int) -> SequenceHashes:
    return np.array(blocks, np.uint64)


def heard(process: SentPrompts) -> list[tuple[WorkerRank, list[int], bool]]:
    return [(rank, blocks.tolist(), guessed) for rank, blocks, guessed, refused in process.news() if not refused]


def test_each_hears_once_what_the_others_told(rings: Rings) -> None:
    first, second, third = (process(rings, own) for own in range(3))
    first.tell(A, chain(1, 2, 2**64 - 1), guessed=False)
    second.tell(B, chain(3), guessed=True)
    assert heard(third) == [(A, [1, 2, 2**64 - 1], False), (B, [3], True)]
    assert heard(first) == [(B, [3], True)]
    assert heard(third) == heard(first) == []
    first.tell(B, chain(4), guessed=False)
    assert heard(third) == [(B, [4], False)]


def test_of_a_rank_that_a_process_does_not_know_it_hears_nothing(rings: Rings) -> None:
    first, second = process(rings, 0, (A, B, C)), process(rings, 1)
    first.tell(C, chain(1), guessed=False)
    first.tell(B, chain(2), guessed=False)
    assert heard(second) == [(B, [2], False)]
    second.tell(C, chain(3), guessed=False)
    assert heard(first) == []


@pytest.mark.parametrize("guessed", [False, True])
def test_what_was_refused_is_told_apart(rings: Rings, guessed: bool) -> None:
    first, second = (process(rings, own) for own in range(2))
    first.tell(A, chain(1, 2), guessed=guessed)
    first.tell(A, chain(2), guessed=guessed, refused=True)
    said = [(blocks.tolist(), of_stand_ins, refused) for _, blocks, of_stand_ins, refused in second.news()]
    assert said == [([1, 2], guessed, False), ([2], guessed, True)]


def test_an_empty_chain_tells_nothing(rings: Rings) -> None:
    first, second = (process(rings, own) for own in range(2))
    first.tell(A, chain(), guessed=False)
    assert heard(second) == []
    first.tell(A, chain(1), guessed=False)
    assert heard(second) == [(A, [1], False)]


def test_of_a_long_prompt_the_beginning_is_told(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "_MOST", 5)
    first, second = (process(rings, own) for own in range(2))
    first.tell(A, np.arange(10, 20, dtype=np.uint64), guessed=False)
    assert heard(second) == [(A, [10, 11, 12, 13, 14], False)]


@pytest.mark.parametrize("seed", range(5))
def test_rings_wrap(rings: Rings, seed: int) -> None:
    """Records of all lengths, read at any time but before the ring is full, come whole and in order."""
    draw = random.Random(seed)
    first, second = (process(rings, own) for own in range(2))
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
    first, second = (process(rings, own) for own in range(2))
    for number in range(100):
        first.tell(A, chain(number, number), guessed=False)
    assert heard(second) == []
    first.tell(A, chain(7), guessed=False)
    assert heard(second) == [(A, [7], False)]


def test_a_process_that_starts_again_goes_on_in_its_ring(rings: Rings) -> None:
    first, second = (process(rings, own) for own in range(2))
    first.tell(A, chain(1), guessed=False)
    again = process(rings, 0)
    second.tell(B, chain(2), guessed=False)
    again.tell(A, chain(3), guessed=False)
    assert heard(second) == [(A, [1], False), (A, [3], False)]
    assert heard(again) == [(B, [2], False)]


@pytest.mark.parametrize(("word", "value"), [(4, 5), (5, 0), (5, 2**63 + 2)])
def test_words_that_came_out_of_order_are_not_believed(rings: Rings, word: int, value: int) -> None:
    first, second = (process(rings, own) for own in range(2))
    first.tell(A, chain(1), guessed=False)
    first.tell(A, chain(2, 3), guessed=False)
    rings[0, word] = value
    assert heard(second) == [(A, [1], False)]
    first.tell(B, chain(4), guessed=False)
    assert heard(second) == [(B, [4], False)]
