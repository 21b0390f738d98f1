"""The index against a plain dictionary of sets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer.kernels import NO_SECRET, blocks_in
from indexer.matches import Overlap
from indexer.prefix_index import PrefixIndex
from indexer.types import Tier, WorkerRank
from tests.examples import examples

RANKS = [WorkerRank(name, rank) for name in ("a", "b", "c") for rank in (0, 1)]
ranks = st.sampled_from(RANKS)
tiers = st.sampled_from(list(Tier))
blocks = st.lists(st.integers(0, 12), max_size=8)


Windows = dict[WorkerRank, dict[int, set[int]]]
"""What layers with a window hold, by window."""


def goes_on(prompt: list[int], end: int, windows: dict[int, set[int]]) -> bool:
    return all(set(prompt[max(0, end - window) : end]) <= held for window, held in windows.items())


def model_overlap(
    held: dict[tuple[WorkerRank, Tier], set[int]], windows: Windows, prompt: list[int]
) -> dict[WorkerRank, Overlap]:
    expected = {}
    for rank in RANKS:
        anywhere = set[int]().union(*(held.get((rank, tier), set()) for tier in Tier))
        lengths = []
        for have in (anywhere, held.get((rank, Tier.GPU), set())):
            missing = [i for i, block in enumerate(prompt) if block not in have]
            lengths.append(missing[0] if missing else len(prompt))
        bound = windows.get(rank, {})
        lengths = [max(end for end in range(length + 1) if goes_on(prompt, end, bound)) for length in lengths]
        if lengths[0]:
            expected[rank] = Overlap(*lengths)
    return expected


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[tuple[WorkerRank, Tier], set[int]] = {}
        self.windows: Windows = {}

    @rule(rank=ranks, tier=tiers, hashes=blocks)
    def store(self, rank: WorkerRank, tier: Tier, hashes: list[int]) -> None:
        self.index.store(rank, tier, hashes)
        self.held.setdefault((rank, tier), set()).update(hashes)

    @rule(rank=ranks, tier=tiers, hashes=blocks)
    def remove(self, rank: WorkerRank, tier: Tier, hashes: list[int]) -> None:
        self.index.remove(rank, tier, hashes)
        self.held.setdefault((rank, tier), set()).difference_update(hashes)

    @rule(rank=ranks, window=st.integers(1, 3), hashes=blocks)
    def store_window(self, rank: WorkerRank, window: int, hashes: list[int]) -> None:
        self.index.store_window(rank, window, hashes)
        self.windows.setdefault(rank, {}).setdefault(window, set()).update(hashes)

    @rule(rank=ranks, window=st.integers(1, 3), hashes=blocks)
    def remove_window(self, rank: WorkerRank, window: int, hashes: list[int]) -> None:
        self.index.remove_window(rank, window, hashes)
        self.windows.get(rank, {}).get(window, set()).difference_update(hashes)

    @rule(rank=ranks)
    def clear(self, rank: WorkerRank) -> None:
        self.index.clear(rank)
        self.windows.pop(rank, None)
        for tier in Tier:
            self.held.pop((rank, tier), None)

    @rule(prompt=blocks)
    def find_matches(self, prompt: list[int]) -> None:
        assert self.index.find_matches(prompt) == model_overlap(self.held, self.windows, prompt)

    @invariant()
    def same_contents(self) -> None:
        assert {k: v for k, v in self.index.dump().items() if v} == {k: v for k, v in self.held.items() if v}
        assert self.index.entries() == sum(map(len, self.held.values()))
        for (rank, tier), held in self.held.items():
            assert self.index.blocks(rank, tier) == len(held)


TestIndexAgainstModel = IndexMachine.TestCase
TestIndexAgainstModel.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_a_chain_is_matched_up_to_its_first_missing_block() -> None:
    index = PrefixIndex()
    a, b, c = RANKS[:3]
    index.store(a, Tier.GPU, [1, 2, 3, 4])
    index.store(b, Tier.GPU, [1, 2, 4])
    index.store(c, Tier.GPU, [2, 3, 4])
    assert index.find_matches([1, 2, 3, 4, 5]) == {a: Overlap(4, 4), b: Overlap(2, 2)}
    assert index.find_matches([]) == {}


def test_lower_tiers_extend_a_prefix() -> None:
    index = PrefixIndex()
    index.store(RANKS[0], Tier.GPU, [1, 3])
    index.store(RANKS[0], Tier.CPU, [2])
    assert index.find_matches([1, 2, 3, 4]) == {RANKS[0]: Overlap(3, 1)}


@given(st.integers(65, 200))
@settings(max_examples=5)
def test_more_ranks_than_a_machine_word_has_bits(n: int) -> None:
    index = PrefixIndex()
    for i in range(n):
        index.store(WorkerRank(str(i), 0), Tier.GPU, range(i + 1))
    found = index.find_matches(list(range(n)))
    assert {int(rank.worker_id): overlap.blocks for rank, overlap in found.items()} == {i: i + 1 for i in range(n)}


def test_a_freed_slot_serves_another_rank_without_its_past() -> None:
    index = PrefixIndex()
    index.store(RANKS[0], Tier.GPU, [1])
    index.clear(RANKS[0])
    index.store(RANKS[1], Tier.GPU, [2])
    assert index.find_matches([1]) == {}
    assert index.find_matches([2]) == {RANKS[1]: Overlap(1, 1)}


def test_slots_of_ranks_that_left_are_used_again() -> None:
    """Also where a table must grow while it is being swept, and is swept again at once; and nothing else is lost."""
    index = PrefixIndex()
    for generation in range(40):
        fleet = [WorkerRank(str(generation), number) for number in range(48)]
        chains = [range(first, first + 300) for first in range(14400 * generation, 14400 * (generation + 1), 300)]
        for rank, chain in zip(fleet, chains, strict=True):
            index.store(rank, Tier.GPU, chain)
        for rank in fleet[::2]:
            index.clear(rank)
        for number, chain in enumerate(chains):
            assert index.find_matches(chain) == ({fleet[number]: Overlap(300, 300)} if number % 2 else {})
        for rank in fleet[1::2]:
            index.clear(rank)
    assert index._live_slots.shape[1] <= 4  # those being swept out, and those that wait for it
    assert index.entries() == 0


def test_an_event_of_many_blocks_while_one_rank_is_swept_out_and_another_waits_for_it() -> None:
    index = PrefixIndex()
    a, b, c = RANKS[:3]
    for rank, first in ((a, 0), (b, 10_000), (c, 20_000)):
        index.store(rank, Tier.GPU, range(first, first + 200))
    index.clear(a)
    index.clear(b)
    index.store(c, Tier.GPU, range(30_000, 40_000))
    assert index.find_matches(range(20_000, 20_200)) == {c: Overlap(200, 200)}
    assert index.find_matches(range(30_000, 40_000)) == {c: Overlap(10_000, 10_000)}


@pytest.mark.parametrize("many", [1, 6, 70])  # named in the entry, or in a row of their own, of one word or of two
def test_what_only_ranks_held_that_were_cleared_is_as_good_as_new(many: int) -> None:
    index = PrefixIndex()
    fleet, other, later = [WorkerRank("w", number) for number in range(many)], *RANKS[:2]
    for rank in fleet:
        index.store(rank, Tier.GPU, range(1500))
    assert index.store(other, Tier.GPU, range(1000, 2000)) == 500
    for rank in fleet:
        index.clear(rank)
    assert [index.store(rank, Tier.GPU, range(1500)) for rank in (later, *fleet)] == [1000] + [0] * many
    assert index.dump()[later, Tier.GPU] == set(range(1500))


@pytest.mark.parametrize("mark", [0, 1])
def test_no_block_is_taken_for_an_empty_place(mark: int) -> None:
    """A client can choose tokens whose block has the hash that would be such a mark in the table."""
    block = int(blocks_in(np.array([mark, 0], np.uint64), NO_SECRET)[0])
    index, rank = PrefixIndex(), RANKS[0]
    for _ in range(300):  # more often than an empty table has places
        index.store(rank, Tier.GPU, [block])
        assert index.find_matches([block]) == {rank: Overlap(1, 1)}
        index.remove(rank, Tier.GPU, [block])
        assert (index.entries(), len(index._tables[Tier.GPU])) == (0, 0)
        assert index.find_matches([block]) == {}
    index.store(rank, Tier.GPU, [block])
    index.store(rank, Tier.GPU, range(1000))
    assert index.find_matches([block]) == {rank: Overlap(1, 1)}
    assert (index.entries(), len(index._tables[Tier.GPU])) == (1001, 1001)


@pytest.mark.parametrize(("secret", "crowded"), [(NO_SECRET, True), (0x1F3D5B79A2C4E608, False)])
def test_nobody_can_crowd_blocks_in_one_place_without_the_secret(secret: int, crowded: bool) -> None:
    """A client can choose tokens so that thousands of blocks have hashes that belong into one place."""
    keys = (np.uint64(77) << np.uint64(55)) + np.arange(8000, dtype=np.uint64) * np.uint64((1 << 55) // 8000)
    index = PrefixIndex(secret=secret)
    index.store(RANKS[0], Tier.GPU, blocks_in(np.repeat(keys, 2), NO_SECRET))
    entries = index._tables[Tier.GPU]._table
    places = np.flatnonzero(entries[::2] > 1)
    homes = [(int(key) >> 32) * (len(entries) // 2) >> 32 for key in entries[::2][places]]
    steps = (places - np.array(homes)) % (len(entries) // 2)
    assert (steps.max() > 1000) == crowded
    assert (steps.max() < 100) != crowded


def test_a_slot_that_serves_another_is_no_longer_bound_by_windows() -> None:
    index = PrefixIndex()
    index.store_window(RANKS[0], 1, [])
    index.clear(RANKS[0])
    index.store(RANKS[1], Tier.GPU, [1])
    assert index.find_matches([1]) == {RANKS[1]: Overlap(1, 1)}
    assert index.windows(RANKS[1]) == []


def test_a_fleet_may_have_other_windows_again_and_again() -> None:
    """Only so many at a time are kept; those of ranks that have left do not count."""
    index = PrefixIndex()
    for window in range(1, 20):
        rank = WorkerRank(str(window), 0)
        index.store(rank, Tier.GPU, [1, 2, 3])
        index.store_window(rank, window, [1, 2, 3])
        index.store_window(RANKS[0], window, [])
        assert index.find_matches([1, 2, 3]) == {rank: Overlap(3, 3)}
        index.clear(RANKS[0])
        index.clear(rank)
