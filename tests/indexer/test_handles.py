"""Engine hashes against a plain model of an engine that holds copies of blocks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer.handle_kernels import KEY, names_of
from indexer.handles import BlockHandles, UnknownParent, block_names
from indexer.hashing import chain_hashes, pack_tokens
from indexer.kernels import NO_SECRET
from indexer.types import Tier
from tests.examples import examples

SIZE = 2
tiers = st.sampled_from([Tier.GPU, Tier.CPU])


def engine_hash(tokens: tuple[int, ...]) -> int:
    """As engines do: a function of the whole prefix. Multiples of a power of two: the worst for a table."""
    return (hash(tokens) & 0xFFFF) << 32


class EngineMachine(RuleBasedStateMachine):
    """An engine stores prompts block by block, drops copies in any order, sometimes clears."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = BlockHandles()
        self.copies: Counter[tuple[Tier, tuple[int, ...]]] = Counter()

    @rule(tier=tiers, prompt=st.lists(st.integers(0, 2), min_size=2, max_size=8).map(lambda p: p[: len(p) // 2 * 2]))
    def store_prompt(self, tier: Tier, prompt: list[int]) -> None:
        prefixes = [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
        expected = [p for p in prefixes if not self.copies[tier, p]]
        new = self.handles.store(tier, [engine_hash(p) for p in prefixes], None, prompt, SIZE, 0)
        assert new.tolist() == [chain_hashes(pack_tokens(p), SIZE, 0)[-1] for p in expected]
        self.copies.update((tier, p) for p in prefixes)

    @precondition(lambda self: +self.copies)
    @rule(data=st.data())
    def drop_a_copy(self, data: st.DataObject) -> None:
        tier, prefix = data.draw(st.sampled_from(sorted(+self.copies)))
        self.copies[tier, prefix] -= 1
        gone = self.handles.remove(tier, [engine_hash(prefix)])
        ours = chain_hashes(pack_tokens(prefix), SIZE, 0)[-1]
        assert gone.tolist() == ([] if self.copies[tier, prefix] else [ours])

    @rule(tier=tiers)
    def drop_what_is_not_there(self, tier: Tier) -> None:
        assert self.handles.remove(tier, [1 << 40]).tolist() == []

    @rule()
    def clear(self) -> None:
        self.handles.clear()
        self.copies.clear()

    @rule(names=st.lists(st.integers(1 << 41, 1 << 42), max_size=2000, unique=True))
    def grow_and_shrink(self, names: list[int]) -> None:
        """Blocks of another prompt come and go: whatever else is held must survive being moved about."""
        tokens = list(range(100, 100 + SIZE * len(names)))
        new = self.handles.store(Tier.DISK, names, None, tokens, SIZE, 7)
        assert new.tolist() == chain_hashes(pack_tokens(tokens), SIZE, 7).tolist()
        assert sorted(self.handles.remove(Tier.DISK, names[::-1]).tolist()) == sorted(new.tolist())

    @invariant()
    def holds_what_the_engine_holds(self) -> None:
        expected: dict[Tier, set[int]] = {}
        for tier, prefix in +self.copies:
            expected.setdefault(tier, set()).add(chain_hashes(pack_tokens(prefix), SIZE, 0)[-1])
        assert {tier: set(held) for tier, held in self.handles.held().items()} == expected
        assert len(self.handles) == len({prefix for _, prefix in +self.copies})


TestHandlesAgainstEngine = EngineMachine.TestCase
TestHandlesAgainstEngine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("expected", "places"), [(0, 1024), (39_000, 65_536), (10**15, 2**21)])
def test_there_is_room_at_once_for_what_is_expected(expected: int, places: int) -> None:
    handles = BlockHandles(expected)
    assert len(handles._names) == len(handles._held) == places
    count = min(expected, 39_000)
    for first in range(0, count, 1000):
        handles.store(Tier.GPU, range(first, first + 1000), None, range(first, first + 1000), 1, 0)
    assert (len(handles), len(handles._names), len(handles._held)) == (count, places, places)
    handles.clear()
    assert (len(handles), len(handles._names)) == (0, places)


def test_children_continue_their_parents_chain() -> None:
    handles = BlockHandles()
    first = handles.store(Tier.GPU, [b"x"], None, [1, 2], 2, 0)
    second = handles.store(Tier.GPU, [b"y"], b"x", [3, 4], 2, 99)
    assert [*first, *second] == chain_hashes(pack_tokens([1, 2, 3, 4]), 2, 0).tolist()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([1], 77, [1, 2], 2, 0), UnknownParent),
        (([1, 2], None, [1, 2], 2, 0), ValueError),
        (([1], None, [1, -2], 2, 0), OverflowError),
        (([1], None, [1, "2"], 2, 0), TypeError),
    ],
)
def test_a_store_that_fails_leaves_nothing_behind(arguments: tuple[object, ...], error: type[Exception]) -> None:
    handles = BlockHandles()
    with pytest.raises(error):
        handles.store(Tier.GPU, *arguments)  # type: ignore[arg-type]
    assert handles.held() == {}
    assert len(handles) == 0


@pytest.mark.parametrize("engine_hash", [0, 1, -1, 2**64 - 1, -(2**63), 2**200, -(2**64), b"", b"x" * 32])
def test_any_hash_can_be_one(engine_hash: int | bytes) -> None:
    handles = BlockHandles()
    stored = handles.store(Tier.GPU, [engine_hash], None, [1, 2], 2, 0)
    assert len(handles.store(Tier.GPU, [5], engine_hash, [3, 4], 2, 0)) == 1
    assert handles.remove(Tier.GPU, [engine_hash]).tolist() == stored.tolist()


@pytest.mark.parametrize("engine_hash", [int(name) for name in names_of(np.arange(2, dtype=np.uint64), NO_SECRET)])
def test_a_name_that_would_be_a_mark_of_the_table_is_held_like_others(engine_hash: int) -> None:
    handles = BlockHandles()
    handles.store(Tier.GPU, [engine_hash], None, [1, 2], 2, 0)
    assert len(handles) == 1
    assert len(handles.remove(Tier.GPU, [engine_hash])) == 1
    assert handles.held() == {}


@given(st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40)))
def test_different_hashes_have_different_names(hashes: list[int | bytes]) -> None:
    """Save for numbers that are the same 64 bits, signed and unsigned: an engine sends either these or those."""
    patterns = {h & 2**64 - 1 if isinstance(h, int) else h for h in hashes}
    assert len(set(block_names(hashes).tolist())) == len(patterns)


def test_long_numbers_are_more_than_their_last_64_bits() -> None:
    assert len(set(block_names([7, 7 + 2**64, 7 + 2**200]).tolist())) == 3


def test_another_tables_blocks_are_adopted_copy_by_copy() -> None:
    known, handles = BlockHandles(), BlockHandles()
    known.store(Tier.GPU, range(900), None, range(900), 1, 0)
    names, hashes = known.find(range(900))
    before = hashes.tolist()
    assert handles.adopt(Tier.CPU, names[:1], hashes[:1]).tolist() == before[:1]
    assert handles.adopt(Tier.CPU, names, hashes).tolist() == before[1:]
    assert hashes.tolist() == before
    assert len(handles._names) == len(handles._held) > 1024
    assert [handles.remove(Tier.CPU, names).tolist() for _ in range(2)] == [before[1:], before[:1]]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=300), st.integers(0, 60))
def test_places_close_up_behind_what_is_removed(steps: list[tuple[bool, int]], shift: int) -> None:
    """Against a plain counter, where many names want the same places."""
    handles, copies = BlockHandles(), Counter[int]()
    for store, number in steps:
        name = number << shift & 2**64 - 1
        if store:
            handles.store(Tier.GPU, [name], None, [number], 1, 0)
            copies[name] += 1
        else:
            gone = handles.remove(Tier.GPU, [name])
            assert len(gone) == (copies[name] == 1)
            copies[name] = max(0, copies[name] - 1)
        assert len(handles) == len(+copies)


@pytest.mark.parametrize(("secret", "crowded"), [(NO_SECRET, True), (0x1F3D5B79A2C4E608, False)])
def test_nobody_can_crowd_blocks_in_one_place_without_the_secret(secret: int, crowded: bool) -> None:
    """Engines' hashes can be foreseen, and the tokens chosen by them."""
    names = names_of(np.arange(77 << 55, 78 << 55, (1 << 55) // 2000, dtype=np.uint64), NO_SECRET)
    handles = BlockHandles(secret=secret)
    handles.store(Tier.GPU, names, None, [0] * len(names), 1, 0)
    mask = len(handles._names) - 1
    places = np.flatnonzero(handles._names[:, KEY])
    homes = [int(key) * (mask + 1) >> 64 for key in handles._names[places, KEY]]
    steps = (places - np.array(homes)) & mask
    assert (steps.max() > 1000) == crowded
    assert (steps.max() < 100) != crowded
