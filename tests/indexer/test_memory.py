"""With a cap on memory the index may know less than there is, never more, and never takes more than it may."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer import kernels
from indexer.assumed import AssumedPrefixes
from indexer.hashing import SequenceHashes
from indexer.kv_indexer import KVIndexer
from indexer.lives import BYTES_PER_LIFE
from indexer.prefix_index import LEAST_BYTES, PrefixIndex, warm_up
from indexer.types import RankSet, Tier, WorkerRank
from tests.examples import examples

RANKS = [WorkerRank("w", number) for number in range(8)]
EVERYBODY = RankSet(RANKS)
AMPLE = 64 << 20
CHAINS = [np.random.default_rng(number).integers(0, 1 << 63, 400, dtype=np.uint64) for number in range(12)]
ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU])
chains = st.integers(0, len(CHAINS) - 1)


def prompts(seed: int, blocks: int = 500) -> Iterator[SequenceHashes]:
    """None like another."""
    draw = np.random.default_rng(seed)
    while True:
        yield draw.integers(0, 1 << 63, blocks, dtype=np.uint64)


def rows_lost(index: PrefixIndex) -> int:
    """Rows of holders that neither belong to a block nor are free."""
    lost = 0
    for table in index._tables.values():
        entries = np.concatenate((table._table, table._old))
        values = entries[1::2][entries[::2] > kernels._TOMB]
        in_rows = values[(values >> kernels._45) & kernels._LANE == kernels._IN_ROW] & kernels._ROW_MASK
        lost += len(table._rows) - 1 - len(np.unique(in_rows)) - table._figures[kernels.FREE_ROWS]
    return lost


class CappedMachine(RuleBasedStateMachine):
    """Far more than fits: many holders of the same blocks (rows), churn, ranks that leave, more ranks than slots.

    An index without a cap and plain sets are told the same.
    """

    @initialize(cap=st.sampled_from([LEAST_BYTES, 2 * LEAST_BYTES, 1 << 20, AMPLE]))
    def begin(self, cap: int) -> None:
        self.cap, self.index, self.uncapped = cap, PrefixIndex(cap), PrefixIndex()
        self.held: dict[tuple[WorkerRank, Tier], set[int]] = {(rank, tier): set() for rank in RANKS for tier in Tier}
        self.passing = 0

    @rule(rank=ranks, tier=tiers, chain=chains)
    def store(self, rank: WorkerRank, tier: Tier, chain: int) -> None:
        for index in (self.index, self.uncapped):
            index.store(rank, tier, CHAINS[chain])
        self.held[rank, tier].update(CHAINS[chain].tolist())

    @rule(chain=chains)
    def store_everywhere(self, chain: int) -> None:
        for rank in RANKS:
            self.store(rank, Tier.GPU, chain)

    @rule(rank=ranks, tier=tiers, chain=chains, first=st.integers(0, 399))
    def remove(self, rank: WorkerRank, tier: Tier, chain: int, first: int) -> None:
        """Also what was evicted, or refused."""
        for index in (self.index, self.uncapped):
            index.remove(rank, tier, CHAINS[chain][first:])
        self.held[rank, tier].difference_update(CHAINS[chain][first:].tolist())

    @rule(rank=ranks)
    def clear(self, rank: WorkerRank) -> None:
        for index in (self.index, self.uncapped):
            index.clear(rank)
        for tier in Tier:
            self.held[rank, tier].clear()

    @rule(many=st.integers(1, 100), chain=chains)
    def others_come_and_go(self, many: int, chain: int) -> None:
        others = [WorkerRank("other", self.passing + number) for number in range(many)]
        self.passing += many
        for index in (self.index, self.uncapped):
            for rank in others:
                index.store(rank, Tier.GPU, CHAINS[chain])
            for rank in others:
                index.clear(rank)

    @rule(chain=chains)
    def look_up(self, chain: int) -> None:
        """No rank is said to hold more than it does; nor less, if nothing was lost."""
        found, true = (index.find_matches(CHAINS[chain]) for index in (self.index, self.uncapped))
        assert (found.blocks_of(EVERYBODY) <= true.blocks_of(EVERYBODY)).all()
        assert (found.gpu_blocks_of(EVERYBODY) <= true.gpu_blocks_of(EVERYBODY)).all()
        if not self.index.evicted and not self.index.refused:
            assert found == true

    @invariant()
    def stays_within_its_memory(self) -> None:
        assert self.index.nbytes <= self.index._reserved <= self.cap

    @invariant()
    def loses_nothing_where_all_fits(self) -> None:
        assert self.cap < AMPLE or not self.index.evicted + self.index.refused

    @rule()
    def check_all_that_it_holds(self) -> None:
        for key, blocks in self.index.dump().items():
            assert blocks <= self.held[key]
            assert len(blocks) == self.index.blocks(*key)
        for key, blocks in self.uncapped.dump().items():
            assert blocks == self.held[key]

    @invariant()
    def loses_no_row(self) -> None:
        assert rows_lost(self.index) == rows_lost(self.uncapped) == 0


TestCapped = CappedMachine.TestCase
TestCapped.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


def churn(cap: int, turnovers: int) -> PrefixIndex:
    """`turnovers` times what fits comes and goes: a prompt that is asked for stays, and so does what came last."""
    index, hot, floor, whole = PrefixIndex(cap), next(prompts(0)), cap, 0
    index.store(RANKS[0], Tier.GPU, hot)
    turns = turnovers * cap // 32 // 500
    for turn, prompt in zip(range(turns), prompts(1), strict=False):
        rank = RANKS[1 + turn % 7]
        index.store(rank, Tier.GPU, prompt)
        assert index.find_matches(hot).blocks_of(EVERYBODY)[0] == 500
        whole += index.find_matches(prompt)[rank].blocks == 500
        if turn % 3 == 0:
            index.remove(rank, Tier.GPU, prompt[250:])
        if turn % 500 == 499:
            index.clear(rank)
        if turn > turns // turnovers:
            floor = min(floor, index.nbytes)
        assert index.nbytes <= index._reserved <= cap
    assert floor > cap // 4  # it uses what it is given
    assert index.evicted > index.entries()
    assert whole > 0.998 * turns
    assert index.refused < 0.0005 * 500 * turns
    return index


def test_churn_stays_flat_and_keeps_what_is_used() -> None:
    """By its own account and the allocator's, moments of growth included. (Bigger tables are mapped, unseen by it.)"""
    cap = 2 << 20
    warm_up()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = churn(cap, 12)
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    slack = 100_000  # a prompt's hashes, slots, the interpreter's own
    assert most - before <= cap + slack
    assert index.nbytes <= now - before <= index.nbytes + slack


@pytest.mark.slow
@pytest.mark.parametrize("cap", [1 << 20, 1 << 22, 1 << 24])
def test_churn_for_long(cap: int) -> None:
    churn(cap, 40)


def test_all_that_fits_is_kept() -> None:
    """Removed and stored again for long: idle blocks are not dropped as long as there is room."""
    index, idle = PrefixIndex(4 << 20), list(zip(range(60), prompts(2), strict=False))
    for _, prompt in idle:
        index.store(RANKS[0], Tier.GPU, prompt)
    for _, prompt in zip(range(1000), prompts(3), strict=False):
        index.store(RANKS[1], Tier.GPU, prompt)
        index.remove(RANKS[1], Tier.GPU, prompt)
    assert index.evicted == index.refused == 0
    assert all(index.find_matches(prompt)[RANKS[0]].blocks == 500 for _, prompt in idle)


def test_blocks_held_by_many_find_room_beside_those_of_one() -> None:
    """Rows are needed when entries have long taken all that they may."""
    index = PrefixIndex(1 << 20)
    for turn, prompt in zip(range(200), prompts(4), strict=False):
        index.store(RANKS[turn % 8], Tier.GPU, prompt)
    shared = [prompt for _, prompt in zip(range(10), prompts(5), strict=False)]
    for prompt in shared:
        for rank in RANKS:
            index.store(rank, Tier.GPU, prompt)
    assert index.find_matches(shared[-1]).blocks_of(EVERYBODY).tolist() == [500] * 8


@pytest.mark.parametrize("how", ["removed", "cleared", "evicted"])
def test_rows_of_blocks_that_are_gone_are_used_again(how: str) -> None:
    """Else none would be left after days, and blocks of more than four holders would be refused."""
    index, stays = PrefixIndex(1 << 18), WorkerRank("stays", 0)
    for _, prompt in zip(range(300), prompts(16, 100), strict=False):
        index.store(stays, Tier.GPU, prompt[:5])
        for rank in RANKS:
            index.store(rank, Tier.GPU, prompt)
        for rank in RANKS:
            if how == "removed":
                index.remove(rank, Tier.GPU, prompt)
            elif how == "cleared":
                index.clear(rank)
        assert rows_lost(index) == 0
    assert bool(index.evicted) == (how == "evicted")


def test_a_tier_that_comes_late_gets_its_share() -> None:
    index = PrefixIndex(1 << 20)
    for _, prompt in zip(range(200), prompts(6), strict=False):
        index.store(RANKS[0], Tier.GPU, prompt)
    for _, prompt in zip(range(400), prompts(7), strict=False):
        for tier in (Tier.GPU, Tier.CPU):
            index.store(RANKS[0], tier, prompt)
    gpu, cpu = (index.blocks(RANKS[0], tier) for tier in (Tier.GPU, Tier.CPU))
    assert gpu / 2 < cpu < gpu * 2


def test_windows_that_come_late_get_their_share_and_never_more_is_known_than_is_so() -> None:
    index = PrefixIndex(1 << 20)
    for _, prompt in zip(range(200), prompts(6), strict=False):
        index.store(RANKS[0], Tier.GPU, prompt)
    whole = 0
    for _, prompt in zip(range(400), prompts(7), strict=False):
        index.store(RANKS[0], Tier.GPU, prompt)
        index.store_window(RANKS[0], 8, prompt)
        whole += (RANKS[0], (500, 500)) in index.find_matches(prompt).items()
        assert index._reserved <= 1 << 20
    assert whole > 200
    index.remove_window(RANKS[0], 8, prompt[-1:])
    assert index.find_matches(prompt)[RANKS[0]].blocks < 500


@pytest.mark.parametrize("part", ["tier", "window"])
def test_what_only_ranks_had_that_have_left_takes_no_memory(part: str) -> None:
    """Nobody stores there any more, and what is condemned is swept out by and by with each call."""
    fresh, index = PrefixIndex(1 << 20), PrefixIndex(1 << 20)
    for turn, prompt in zip(range(200), prompts(14), strict=False):
        if part == "tier":
            index.store(RANKS[turn % 2], Tier.CPU, prompt)
        else:
            index.store_window(RANKS[turn % 2], 8, prompt)
    lost = index.evicted + index.refused
    for rank in RANKS[:2]:
        index.clear(rank)
    assert index.evicted + index.refused == lost > 0
    for _, prompt in zip(range(200), prompts(15), strict=False):
        for one in (index, fresh):
            one.store(RANKS[2], Tier.GPU, prompt)
        assert index._reserved <= 1 << 20
    assert index.blocks(RANKS[2], Tier.GPU) == fresh.blocks(RANKS[2], Tier.GPU)


def test_one_event_of_more_than_fits() -> None:
    """It takes what it can of the head, which is what look-ups begin with."""
    index = PrefixIndex(1 << 18)
    prompt = next(prompts(8, 1_000_000))
    index.store(RANKS[0], Tier.GPU, prompt)
    index.remove(RANKS[0], Tier.GPU, prompt)
    assert index.entries() == 0
    index.store(RANKS[0], Tier.GPU, prompt[:500])
    assert index.find_matches(prompt)[RANKS[0]].blocks == 500


def test_more_ranks_than_slots_when_memory_is_full() -> None:
    """Rows cannot be made wider then: everything is dropped, and what comes after it is known."""
    index = PrefixIndex(1 << 20)
    many = [WorkerRank("many", number) for number in range(65)]
    for number, prompt in zip(range(600), prompts(9), strict=False):
        for rank in many[number % 59 : number % 59 + 6]:
            index.store(rank, Tier.GPU, prompt)
    assert len(index.slots()) == 64
    before, evicted = index.entries(), index.evicted
    index.store(many[64], Tier.GPU, CHAINS[0])
    assert index.evicted == evicted + before
    assert index.find_matches(CHAINS[0]) == {many[64]: (400, 400)}
    assert index._reserved <= 1 << 20


def test_a_rank_that_comes_while_another_is_swept_out_costs_nobody_anything() -> None:
    index = PrefixIndex(1 << 20)
    many = [WorkerRank("many", number) for number in range(64)]
    for number, prompt in zip(range(600), prompts(10), strict=False):
        for rank in many[number % 59 : number % 59 + 6]:
            index.store(rank, Tier.GPU, prompt)
    held = index.blocks(many[1], Tier.GPU)
    index.clear(many[0])
    new, refused = WorkerRank("new", 0), index.refused
    while not index.blocks(new, Tier.GPU):
        index.store(new, Tier.GPU, CHAINS[0])
        refused += 400
        assert index.refused <= refused
    assert index.blocks(many[1], Tier.GPU) > held / 2


def test_more_ranks_than_memory_allows_are_refused() -> None:
    index = PrefixIndex(LEAST_BYTES)
    for number in range(2000):
        index.store(WorkerRank("many", number), Tier.GPU, CHAINS[0][:5])
        assert index._reserved <= LEAST_BYTES
    known = len(index.slots())
    assert 64 <= known < 2000
    assert index.entries() + index.evicted + index.refused == 2000 * 5
    index.store_window(WorkerRank("one more", 0), 1, CHAINS[0][:5])
    assert (index.entries() + index.evicted + index.refused, len(index.slots())) == (2001 * 5, known)
    for rank in list(index.slots()):
        index.clear(rank)
    for _ in range(10):  # the sweep goes on with those that are refused
        index.store(WorkerRank("later", 0), Tier.GPU, CHAINS[0][:5])
    assert index.find_matches(CHAINS[0][:5])[WorkerRank("later", 0)].blocks == 5


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        PrefixIndex(LEAST_BYTES - 1)


def test_what_is_assumed_is_limited_too() -> None:
    """The oldest goes first, from the index as well; what is remembered takes no more than is reckoned for it."""
    index = PrefixIndex()
    tracemalloc.start()
    try:
        assumed = AssumedPrefixes(index, ttl=1.0, max_bytes=2000 * BYTES_PER_LIFE)
        before, tables = tracemalloc.get_traced_memory()[0], index.nbytes
        for turn, prompt in zip(range(50), prompts(11, 100), strict=False):
            assumed.assume(RANKS[turn % 2], prompt, 0.0)
            last = prompt
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(assumed) == index.entries() == 2000
    assert assumed.evicted == 3000
    assert index.find_matches(last)[RANKS[1]].blocks == 100
    assert max(now, most) - before - (index.nbytes - tables) <= 2000 * BYTES_PER_LIFE
    assumed.expire(1.0)
    assert index.entries() == 0
    assert assumed.evicted == 3000


def test_what_is_assumed_of_caches_of_known_size_is_limited_too() -> None:
    """Where most is held, the oldest goes first."""
    index = PrefixIndex()
    assumed = AssumedPrefixes(index, ttl=1.0, max_bytes=1000 * BYTES_PER_LIFE)
    for rank in RANKS[:2]:
        assumed.resize(rank, 10_000)
    first, *more, last = itertools.islice(prompts(13, 100), 12)
    assumed.assume(RANKS[1], first, 0.0)
    for prompt in more:
        assumed.assume(RANKS[0], prompt, 0.0)
    assumed.assume(RANKS[2], last, 0.0)
    assert len(assumed) == index.entries() == 998, "each order takes a row"
    assert assumed.evicted == 202
    assert index.find_matches(first)[RANKS[1]].blocks == index.find_matches(last)[RANKS[2]].blocks == 100
    assert not index.find_matches(more[0])


def test_the_indexer_shares_its_limit_out() -> None:
    cap = 16 * LEAST_BYTES
    indexer = KVIndexer(max_bytes=cap)
    for number, prompt in zip(range(800), prompts(12), strict=False):
        note = indexer.assume if number % 2 else indexer.predict
        note(RANKS[0], prompt, float(number))
        assert indexer.nbytes <= cap
    indexer.index.store(RANKS[1], Tier.GPU, next(prompts(13, 10_000)))
    assert indexer.index.nbytes <= cap
    assert indexer.evicted > 0
