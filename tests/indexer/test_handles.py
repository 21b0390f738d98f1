"""Engine hashes against a plain model of an engine that holds copies of blocks."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer.handles import BlockHandles, UnknownParent
from indexer.hashing import chain_hashes, pack_tokens
from indexer.types import Tier

SIZE = 2
tiers = st.sampled_from([Tier.GPU, Tier.CPU])


def engine_hash(tokens: tuple[int, ...]) -> int:
    """As engines do: a function of the whole prefix, unlike ours."""
    return hash(tokens) & 0xFFFF


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
        assert new == [chain_hashes(pack_tokens(p), SIZE, 0)[-1] for p in expected]
        self.copies.update((tier, p) for p in prefixes)

    @precondition(lambda self: +self.copies)
    @rule(data=st.data())
    def drop_a_copy(self, data: st.DataObject) -> None:
        tier, prefix = data.draw(st.sampled_from(sorted(+self.copies)))
        self.copies[tier, prefix] -= 1
        gone = self.handles.remove(tier, [engine_hash(prefix)])
        ours = chain_hashes(pack_tokens(prefix), SIZE, 0)[-1]
        assert gone == ([] if self.copies[tier, prefix] else [ours])

    @rule(tier=tiers)
    def drop_what_is_not_there(self, tier: Tier) -> None:
        assert self.handles.remove(tier, [1 << 40]) == []

    @rule()
    def clear(self) -> None:
        self.handles.clear()
        self.copies.clear()

    @invariant()
    def holds_what_the_engine_holds(self) -> None:
        expected: dict[Tier, set[int]] = {}
        for tier, prefix in +self.copies:
            expected.setdefault(tier, set()).add(chain_hashes(pack_tokens(prefix), SIZE, 0)[-1])
        assert {tier: set(held) for tier, held in self.handles.held().items()} == expected
        assert len(self.handles) == len({prefix for _, prefix in +self.copies})


TestHandlesAgainstEngine = EngineMachine.TestCase
TestHandlesAgainstEngine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_children_continue_their_parents_chain() -> None:
    handles = BlockHandles()
    first = handles.store(Tier.GPU, [b"x"], None, [1, 2], 2, 0)
    second = handles.store(Tier.GPU, [b"y"], b"x", [3, 4], 2, 99)
    assert first + second == chain_hashes(pack_tokens([1, 2, 3, 4]), 2, 0).tolist()


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
