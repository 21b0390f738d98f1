"""What is asked for most is found among much that is asked for once, in bounded room, and is forgotten in time."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import SequenceHashes, chain_hashes, pack_tokens
from router.store.hot_prefixes import HotPrefixes


def chain(*tokens: int) -> SequenceHashes:
    """A block for each token."""
    return chain_hashes(pack_tokens(list(tokens)), 1, 0)


SYSTEM = list(range(16))


def test_a_shared_beginning_is_found_whole_and_its_parts_are_not_told_beside_it() -> None:
    hot = HotPrefixes()
    for number in range(20):
        hot.ask(chain(*SYSTEM, 1000 + number, 2000 + number), 0.0)
    [found] = hot.hottest(10, 0.0)
    assert (found.sequence_hash, found.blocks) == (int(chain(*SYSTEM)[-1]), 16)
    assert found.asked == 16, "the first four found out how long it is"


def test_two_that_share_a_beginning_are_told_with_what_they_share() -> None:
    hot = HotPrefixes()
    for number in range(40):
        hot.ask(chain(*SYSTEM, *range(100 + number % 4 * 100, 116 + number % 4 * 100)), 0.0)
    found = hot.hottest(10, 0.0)
    assert {one.blocks for one in found} == {16, 32}
    assert sum(one.blocks == 32 for one in found) == 4
    assert len({one.sequence_hash for one in found}) == 5
    assert found == sorted(found, key=lambda one: (-one.asked * one.blocks, one.sequence_hash))
    assert hot.hottest(2, 0.0) == found[:2]


def test_the_order_is_worked_out_once_until_something_is_counted() -> None:
    """Hundreds of workers that leave together ask at the same moment, and it takes milliseconds."""
    hot = HotPrefixes(half_life=10.0)
    for _ in range(4):
        hot.ask(chain(1), 0.0)
    [found] = hot.hottest(1, 0.0)
    assert hot.hottest(9, 9.0)[0] is found
    hot.ask(chain(1), 9.0)
    assert [hot.hottest(1, now)[0].asked for now in (9.0, 10.0)] == [5, 2.5]


def test_a_prompt_like_no_other_costs_one_entry_and_is_not_hot() -> None:
    hot = HotPrefixes()
    for number in range(50):
        hot.ask(chain(*range(number * 100, number * 100 + 64)), 0.0)
    assert len(hot) == 50
    assert hot.hottest(10, 0.0) == []
    hot.ask(chain(), 0.0)
    assert len(hot) == 50


def test_counts_are_halved_with_time() -> None:
    hot = HotPrefixes(half_life=10.0)
    for _ in range(16):
        hot.ask(chain(1), 100.0)
    assert [hot.hottest(1, now)[0].asked for now in (109.9, 110.0, 120.0)] == [16, 8, 4]
    hot.ask(chain(1), 121.0)
    assert hot.hottest(1, 121.0)[0].asked == 5
    assert hot.hottest(1, 1e6) == []


def test_twice_is_often_and_once_is_not() -> None:
    hot = HotPrefixes()
    for number in (1, 2, 2):
        hot.ask(chain(number), 0.0)
    assert [one.sequence_hash for one in hot.hottest(10, 0.0)] == [int(chain(2)[0])]


@pytest.mark.parametrize(("alone", "told"), [(0, {2}), (1, {1, 2})])
def test_a_prefix_is_told_beside_a_longer_one_that_half_of_its_requests_are_for(alone: int, told: set[int]) -> None:
    hot = HotPrefixes()
    for _ in range(3):  # the first two find out that it goes on
        hot.ask(chain(1, 2), 0.0)
    for _ in range(alone):
        hot.ask(chain(1), 0.0)
    assert {one.blocks for one in hot.hottest(10, 0.0)} == told


def test_what_comes_in_the_place_of_another_is_told_by_its_own_requests_alone() -> None:
    hot = HotPrefixes(capacity=2)
    for number, times in ((9, 3), (1, 8)):
        for _ in range(times):
            hot.ask(chain(number), 0.0)
    hot.ask(chain(1, 2), 0.0)
    assert [(one.blocks, one.asked) for one in hot.hottest(10, 0.0)] == [(1, 9)]
    hot.ask(chain(1, 2), 0.0)
    assert [(one.blocks, one.asked) for one in hot.hottest(10, 0.0)] == [(1, 10), (2, 2)]


def test_after_a_halving_whoever_is_counted_least_still_goes_first() -> None:
    hot = HotPrefixes(capacity=2, half_life=10.0)
    for number, times in ((1, 6), (2, 8), (3, 1)):  # the last takes the place of 1, with what that was counted
        for _ in range(times):
            hot.ask(chain(number), 0.0)
    for number in (4, 5):  # in the place of 3, of whose 7 there are 3.5 left, and of 2, of whose 8 there are 4
        hot.ask(chain(number), 10.0)
    assert hot._entries.keys() == {int(chain(number)[0]) for number in (4, 5)}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_hot_survives_a_flood_in_little_room(seed: int) -> None:
    draw, hot = random.Random(seed), HotPrefixes(capacity=50)
    for number in range(5000):
        often = draw.random() < 0.2
        hot.ask(chain(draw.randrange(3) if often else 10_000 + number), float(number) / 100)
        assert len(hot) <= 50
    assert {one.sequence_hash for one in hot.hottest(3, 50.0)} == {int(chain(number)[0]) for number in range(3)}


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 12))
def test_never_told_more_often_than_asked(asked: list[int], capacity: int) -> None:
    """And whoever was asked for more often than one in `capacity` is there: what Space-Saving promises."""
    hot, truth = HotPrefixes(capacity, half_life=1e9), Counter(asked)
    for number in asked:
        hot.ask(np.array([number], np.uint64), 0.0)
    counts = {key: (entry.count, entry.error) for key, entry in hot._entries.items()}
    for number, (count, error) in counts.items():
        assert count - error <= truth[number] <= count
    assert {number for number, times in truth.items() if times > len(asked) / capacity} <= counts.keys()
