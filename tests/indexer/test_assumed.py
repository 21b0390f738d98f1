"""What is assumed lasts for its time to live, against a plain dictionary of when each block ends; or until there is no
room for it, against an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer.assumed import AssumedPrefixes
from indexer.matches import Overlap
from indexer.prefix_index import PrefixIndex
from indexer.types import Tier, WorkerRank
from tests.examples import examples

A, B = WorkerRank("a", 0), WorkerRank("a", 1)
SIZED = WorkerRank("b", 0)
TTL, SIZE = 10.0, 7
ranks = st.sampled_from([A, B])


class Assuming(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.assumed = AssumedPrefixes(self.index, TTL)
        self.now = 0.0
        self.ends: dict[tuple[WorkerRank, int], float] = {}
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.assumed.resize(SIZED, SIZE)

    @rule(rank=ranks, blocks=st.lists(st.integers(0, 9), max_size=6))
    def assume(self, rank: WorkerRank, blocks: list[int]) -> None:
        self.assumed.assume(rank, blocks, self.now)
        self.ends |= {(rank, block): self.now + TTL for block in blocks}

    @rule(blocks=st.lists(st.integers(0, 9), unique=True, max_size=10))
    def assume_sized(self, blocks: list[int]) -> None:
        dropped = self.assumed.assume(SIZED, blocks, self.now)
        for block in reversed(blocks[:SIZE]):
            self.recent[block] = None
            self.recent.move_to_end(block)
        gone = [self.recent.popitem(last=False)[0] for _ in range(len(self.recent) - SIZE)]
        assert {rank: hashes.tolist() for rank, hashes in dropped.items()} == ({SIZED: gone} if gone else {})

    @rule()
    def clear_sized(self) -> None:
        self.assumed.clear(SIZED)
        self.recent.clear()

    @rule(seconds=st.sampled_from([0.0, 3.0, TTL / 2, TTL]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.assumed.expire(self.now)
        self.ends = {key: end for key, end in self.ends.items() if end > self.now}

    @rule(rank=ranks)
    def forget(self, rank: WorkerRank) -> None:
        self.assumed.forget(rank)
        self.ends = {key: end for key, end in self.ends.items() if key[0] != rank}

    @invariant()
    def the_index_holds_what_has_not_ended(self) -> None:
        for rank in (A, B):
            expected = {block for holder, block in self.ends if holder == rank}
            assert self.index.dump().get((rank, Tier.GPU), set()) == expected
        assert self.index.dump().get((SIZED, Tier.GPU), set()) == set(self.recent)
        assert len(self.assumed) == len(self.ends) + len(self.recent)


TestAssumingAgainstModel = Assuming.TestCase
TestAssumingAgainstModel.settings = settings(
    max_examples=examples(80), stateful_step_count=30, deadline=None, derandomize=True
)


def test_a_block_ends_when_its_time_is_over_and_not_before() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assumed.assume(A, [1, 2], 100.0)
    assumed.expire(109.999)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}
    assumed.expire(110.0)
    assert index.find_matches([1]) == {}


def test_assuming_again_renews_the_shared_prefix_only() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assumed.assume(A, [1, 2, 3], 0.0)
    assumed.assume(A, [1, 2, 4], 6.0)
    assumed.expire(10.0)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}
    assert index.find_matches([1, 2, 4]) == {A: Overlap(3, 3)}
    assumed.expire(16.0)
    assert index.entries() == 0


def test_what_is_taken_back_is_held_no_more_and_may_be_assumed_again() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assumed.assume(A, [1, 2, 3], 0.0)
    assumed.retract(A, [2, 3])
    assert index.find_matches([1, 2, 3]) == {A: Overlap(1, 1)}
    assumed.assume(A, [1, 2], 6.0)
    assumed.expire(10.0)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}
    assumed.expire(16.0)
    assert index.entries() == len(assumed) == 0


def test_one_rank_forgotten_leaves_the_other() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    for rank in (A, B):
        assumed.assume(rank, [1], 0.0)
    assumed.forget(A)
    assert index.find_matches([1]) == {B: Overlap(1, 1)}
    assumed.expire(TTL)
    assert index.entries() == 0


def test_a_prompts_end_goes_before_its_beginning() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assumed.resize(A, 4)
    assumed.assume(A, [1, 2, 3], 0.0)
    assumed.assume(A, [5, 6], 1.0)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}
    assumed.expire(1e6)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}


def test_a_size_that_is_found_out_later_counts_for_what_is_assumed_already() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assumed.assume(A, [1, 2, 3], 0.0)
    assumed.assume(B, [1, 2, 3], 0.0)
    assumed.resize(A, 4)
    assumed.expire(TTL)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(3, 3)}
    assumed.assume(A, [4, 5, 6], TTL)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(1, 1)}
    assumed.resize(A, 1)
    assumed.assume(A, [4, 5, 6], TTL)
    assert index.entries() == len(assumed) == 1


def test_without_a_size_any_more_blocks_have_a_time_to_live_again() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    assert not assumed.resize(A, None)
    for _ in range(100):
        assumed.resize(A, 2)
        assumed.assume(A, [1, 2, 3], 0.0)
        assert {rank: sorted(gone.tolist()) for rank, gone in assumed.resize(A, None).items()} == {A: [1, 2]}
    assert index.entries() == len(assumed) == 0
    assert assumed.nbytes == AssumedPrefixes(index, TTL).nbytes
    assumed.assume(A, [1, 2, 3], 0.0)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(3, 3)}
    assert not assumed.resize(A, None)
    assumed.expire(TTL)
    assert index.entries() == 0


def test_a_rank_that_is_forgotten_has_no_size_when_it_comes_again() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, TTL)
    for _ in range(100):
        assumed.resize(A, 2)
        assumed.assume(A, [1, 2, 3], 0.0)
        assumed.forget(A)
    assert assumed.nbytes == AssumedPrefixes(index, TTL).nbytes
    assumed.assume(A, [1, 2, 3], 0.0)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(3, 3)}
    assumed.expire(TTL)
    assert index.entries() == 0


def test_a_time_to_live_may_be_longer_than_any_clock_counts() -> None:
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, 1e300)
    assumed.assume(A, [1, 2], 100.0)
    assert not assumed.expire(1e8)
    assert index.find_matches([1, 2, 3]) == {A: Overlap(2, 2)}
