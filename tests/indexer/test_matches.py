"""Reading overlaps as arrays and as a mapping: the same numbers, whatever happened to the ranks in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.matches import Matches, Overlap
from indexer.prefix_index import PrefixIndex
from indexer.types import PLAIN, RankSet, Tier, WorkerRank
from tests.examples import examples

RANKS = [WorkerRank(str(number), 0) for number in range(8)]
PROMPT = list(range(1, 9))


def agrees(matches: Matches, ranks: RankSet) -> None:
    """Both ways of reading say the same."""
    expected = [matches.get(rank, Overlap(0, 0)) for rank in ranks.ranks]
    assert matches.blocks_of(ranks).tolist() == [overlap.blocks for overlap in expected]
    assert matches.gpu_blocks_of(ranks).tolist() == [overlap.gpu_blocks for overlap in expected]
    assert dict(matches) == dict(matches.items()) == {rank: matches[rank] for rank in matches}
    assert len(matches) == len(list(matches.values()))


def named(matches: Matches, ranks: RankSet) -> None:
    """What each holds of PROMPT is called by its last block."""
    for rank in ranks.ranks:
        blocks = matches.get(rank, Overlap(0, 0)).blocks
        assert matches.prefix_of(rank) == ((blocks, PROMPT[blocks - 1]) if blocks else None)


steps = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from(RANKS),
        st.sampled_from(Tier),
        st.lists(st.sampled_from(PROMPT), max_size=8),
    ),
    st.tuples(st.just("clear"), st.sampled_from(RANKS)),
)


@given(st.lists(steps, max_size=20), st.lists(st.permutations(RANKS), min_size=1, max_size=3))
@settings(max_examples=examples(100))
def test_arrays_and_mapping_agree_while_ranks_come_and_go(steps: list[tuple], orders: list[list[WorkerRank]]) -> None:  # type: ignore[type-arg]
    index = PrefixIndex()
    sets = [RankSet(order[: 3 + number]) for number, order in enumerate(orders)]
    for what, *arguments in steps:
        getattr(index, what)(*arguments)
        matches = index.find_matches(PROMPT)
        for ranks in sets:
            agrees(matches, ranks)
            named(matches, ranks)


def test_a_set_is_read_anew_when_a_rank_got_anothers_slot() -> None:
    index, both = PrefixIndex(), RankSet(RANKS[:2])
    index.store(RANKS[0], Tier.GPU, [1])
    assert index.find_matches([1]).blocks_of(both).tolist() == [1, 0]
    index.clear(RANKS[0])
    for number in range(100):  # more than there were slots: the first one is given out again
        index.store(WorkerRank("other", number), Tier.GPU, [1])
    assert index.find_matches([1]).blocks_of(both).tolist() == [0, 0]
    index.store(RANKS[1], Tier.GPU, [1])
    assert index.find_matches([1]).blocks_of(both).tolist() == [0, 1]


def test_remembered_sets_are_few() -> None:
    index = PrefixIndex()
    index.store(RANKS[0], Tier.GPU, [1])
    matches = index.find_matches([1])
    for _ in range(1000):
        assert matches.blocks_of(RankSet(RANKS[:1])).tolist() == [1]
    assert len(index._positions) <= 64


def test_without_lower_tiers_nothing_is_computed_twice() -> None:
    index, ranks = PrefixIndex(), RankSet(RANKS)
    index.store(RANKS[0], Tier.GPU, [1, 2])
    matches = index.find_matches([1, 2])
    assert matches.gpu_blocks_of(ranks) is matches.cpu_blocks_of(ranks) is matches.blocks_of(ranks)


def test_each_tier_continues_what_those_above_hold() -> None:
    index, ranks = PrefixIndex(), RankSet(RANKS[:4])
    all_three, without_cpu, disk_alone, gap = ranks.ranks
    for rank, tier, hashes in (
        (all_three, Tier.GPU, [1, 2, 6]),
        (all_three, Tier.CPU, [1, 3, 4]),
        (all_three, Tier.DISK, [5, 6, 7]),
        (without_cpu, Tier.GPU, [1, 2]),
        (without_cpu, Tier.DISK, [3]),
        (disk_alone, Tier.DISK, [1, 2]),
        (gap, Tier.GPU, [1]),
        (gap, Tier.CPU, [3]),
        (gap, Tier.DISK, [2]),
    ):
        index.store(rank, tier, hashes)
    matches = index.find_matches(PROMPT)
    found = (matches.gpu_blocks_of(ranks), matches.cpu_blocks_of(ranks), matches.blocks_of(ranks))
    assert [overlaps.tolist() for overlaps in found] == [[2, 2, 0, 1], [4, 2, 0, 1], [7, 3, 2, 3]]


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.DISK])
def test_with_one_lower_tier_the_other_is_not_computed(tier: Tier) -> None:
    index, ranks = PrefixIndex(), RankSet(RANKS)
    index.store(RANKS[0], Tier.GPU, [1])
    index.store(RANKS[0], tier, [2])
    matches = index.find_matches([1, 2])
    same = matches.blocks_of(ranks) if tier is Tier.CPU else matches.gpu_blocks_of(ranks)
    assert matches.cpu_blocks_of(ranks).tolist() == same.tolist() == [2 - (tier is Tier.DISK), *[0] * 7]


def test_rank_sets_are_told_apart_by_identity() -> None:
    one, other = RankSet(RANKS), RankSet(RANKS)
    assert one.ranks == other.ranks == tuple(RANKS)
    assert one != other
    assert len({one, other}) == 2
    assert len(RankSet(())) == 0


def test_several_block_sizes_read_as_one() -> None:
    indexer = KVIndexer()
    small, large, none = RANKS[:3]
    tokens = list(range(96))
    chains = hash_prompt(tokens, [16, 32], PLAIN).chains
    indexer.index.store(small, Tier.GPU, chains[16][:4])
    indexer.index.store(large, Tier.GPU, chains[32][:1])
    indexer.index.store(large, Tier.CPU, chains[32][1:])
    matches = indexer.find_matches(hash_prompt(tokens, [16, 32], PLAIN))
    ranks = RankSet([none, large, small])
    assert matches.blocks_of(ranks).tolist() == matches.known_blocks_of(ranks).tolist() == [0, 3, 4]
    assert matches.cpu_blocks_of(ranks).tolist() == [0, 3, 4]
    assert matches.gpu_blocks_of(ranks).tolist() == [0, 1, 4]
    assert matches == {small: Overlap(4, 4), large: Overlap(3, 1)}
    agrees(matches, ranks)
    assert matches.prefix_of(small) == (4, int(chains[16][3]))
    assert matches.prefix_of(large) == (3, int(chains[32][2]))
    assert matches.prefix_of(none) is None
    with pytest.raises(KeyError):
        matches[none]


def test_a_fleet_of_unknown_block_sizes_holds_nothing() -> None:
    matches = KVIndexer().find_matches(hash_prompt([1, 2, 3], [], PLAIN))
    assert matches.blocks_of(RankSet(RANKS)).tolist() == [0] * len(RANKS)
    assert matches == {}
