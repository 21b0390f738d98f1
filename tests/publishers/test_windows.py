"""Hybrid models: what the router knows of a rank is what the engine would find in its cache.

The engine is one of which every group of layers keeps blocks by itself, as vLLM's do; what it finds is worked out as
vLLM does: the longest prefix that all its full attention holds and at whose end each other group has its window. Each
group may have moved a block to a lower tier, or not."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engines.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    WindowRemoved,
    WindowStored,
)
from indexer.events import LoadReport
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.types import PLAIN, Tier, WorkerRank
from publishers.relay import RankRelay
from tests.examples import examples

RANK = WorkerRank("w", 0)
SIZE = 2
FULL = 1
"""Not the first: its events come between the others'."""
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
"""Of blocks, by their content."""


def names(prompt: list[int]) -> list[int]:
    """The engine's: chained, as ours are."""
    return [hash(tuple(prompt[: end + 1])) & 0xFFFFFFFF for end in range(len(prompt))]


def tokens(prompt: list[int]) -> list[int]:
    return [content for content in prompt for _ in range(SIZE)]


class Hybrid(RuleBasedStateMachine):
    @initialize(windows=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def begin(self, windows: list[int]) -> None:
        self.windows = dict(zip((0, 2, 3), windows, strict=False))
        groups = (*self.windows, FULL)
        self.held: dict[int, Counter[int]] = {group: Counter() for group in groups}
        self.moved: dict[int, Counter[int]] = {group: Counter() for group in groups}
        self.heard_of: set[int] = set()
        self.relay = RankRelay(RANK, 100, ring_size=3, block_size=SIZE)
        self.router = KVIndexer()
        self.router.watch(RANK)
        self.seen: list[list[int]] = []

    @rule(prompt=prompts, data=st.data(), at_once=st.booleans())
    def compute(self, prompt: list[int], data: st.DataObject, at_once: bool) -> None:
        """All that is not found; a group with a window keeps what it likes of it."""
        self.seen.append(prompt)
        first, chain = self.finds(prompt), names(prompt)
        if first == len(prompt):
            return
        events: list[EngineEvent] = []
        for group in sorted(self.held):
            if group == FULL:
                parent = chain[first - 1] if first else None
                content = tokens(prompt[first:])
                events.append(BlockStored(chain[first:], parent, content, SIZE, Tier.GPU))
                self.held[group].update(chain[first:])
            elif kept := [name for name in chain[first:] if data.draw(st.booleans())]:
                events.append(WindowStored(kept, SIZE, group, self.windows[group]))
                self.heard_of.add(group)
                self.held[group].update(kept)
        self.say(events, at_once)

    @rule(data=st.data(), at_once=st.booleans())
    def evict(self, data: st.DataObject, at_once: bool) -> None:
        events: list[EngineEvent] = []
        for group in sorted(self.held):
            for name in sorted(self.held[group].elements()):
                if data.draw(st.integers(0, 3)) == 0:
                    self.held[group][name] -= 1
                    events.append(BlockRemoved([name], Tier.GPU) if group == FULL else WindowRemoved([name], group))
        self.say(events, at_once)

    @rule(data=st.data(), at_once=st.booleans())
    def offload(self, data: st.DataObject, at_once: bool) -> None:
        events: list[EngineEvent] = []
        for group in sorted(self.heard_of | {FULL}):
            # Of what full attention has somewhere: an event before must have said what is in it.
            known = self.held[group].keys() & (+self.held[FULL] | +self.moved[FULL]).keys()
            for name in sorted(name for name in known if self.held[group][name] and not self.moved[group][name]):
                if data.draw(st.booleans()):
                    self.moved[group][name] += 1
                    window = WindowStored([name], SIZE, group, self.windows.get(group, 0), Tier.CPU)
                    events.append(BlockCopied([name], Tier.CPU) if group == FULL else window)
        self.say(events, at_once)

    @rule(data=st.data(), at_once=st.booleans())
    def evict_from_the_lower_tier(self, data: st.DataObject, at_once: bool) -> None:
        events: list[EngineEvent] = []
        for group in sorted(self.moved):
            for name in sorted((+self.moved[group]).keys()):
                if data.draw(st.integers(0, 3)) == 0:
                    self.moved[group][name] -= 1
                    window = WindowRemoved([name], group, Tier.CPU)
                    events.append(BlockRemoved([name], Tier.CPU) if group == FULL else window)
        self.say(events, at_once)

    @rule()
    def clear(self) -> None:
        for held in (*self.held.values(), *self.moved.values()):
            held.clear()
        self.say([AllBlocksCleared()], at_once=True)

    def say(self, events: list[EngineEvent], at_once: bool) -> None:
        """In one step of the engine's, or each in one of its own."""
        apart = sorted(events, key=lambda event: isinstance(event, WindowStored | WindowRemoved))
        for step in [events] if at_once else [[event] for event in apart]:
            for batch in self.relay.apply(EngineBatch(0.0, None, step, {})):
                self.router.on_batch(batch)

    def finds(self, prompt: list[int]) -> int:
        """Blocks."""
        chain = names(prompt)
        missing = [at for at, name in enumerate(chain) if not self.has(FULL, name)]
        longest = missing[0] if missing else len(chain)
        return max(end for end in range(longest + 1) if self.goes_on(chain[:end]))

    def goes_on(self, chain: list[int]) -> bool:
        """Of a group that never kept anything nobody knows."""
        return all(self.has(group, name) for group in self.heard_of for name in chain[-self.windows[group] :])

    def has(self, group: int, name: int) -> bool:
        return bool(self.held[group][name] or self.moved[group][name])

    @invariant()
    def the_router_knows(self) -> None:
        for prompt in self.seen:
            assert self.known(self.router, prompt) == self.finds(prompt)

    @invariant()
    def and_so_does_who_comes_later(self) -> None:
        late = KVIndexer()
        late.watch(RANK)
        for request in late.on_report(LoadReport("w", 0, self.relay.epoch, self.relay.event_id, exact=True)):
            for batch in self.relay.replay(request):
                late.on_batch(batch)
        for prompt in self.seen:
            assert self.known(late, prompt) == self.finds(prompt)

    def known(self, router: KVIndexer, prompt: list[int]) -> int:
        overlap = router.find_matches(hash_prompt(tokens(prompt), [SIZE], PLAIN)).get(RANK)
        return overlap.blocks if overlap else 0


TestHybrid = Hybrid.TestCase
TestHybrid.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)


def test_blocks_of_another_size_and_a_window_that_changes_are_none_of_the_indexs_business() -> None:
    relay = RankRelay(RANK, 100)
    stored = BlockStored([1, 2], None, [0, 1, 2, 3], SIZE, Tier.GPU)
    relay.apply(EngineBatch(0.0, None, [stored, WindowStored([2], 2 * SIZE, 0, 1), WindowRemoved([2], 0)], {}))
    assert relay.counts.skipped == {"group": 1}
    assert len(relay.snapshot()[0].events) == 1
    relay.apply(EngineBatch(0.0, None, [WindowStored([2], SIZE, 0, 1), WindowStored([1], SIZE, 0, 2)], {}))
    assert relay.counts.skipped == {"group": 2}
    assert len(relay.snapshot()[0].events) == 2


def test_a_group_that_is_heard_of_late_holds_nothing_of_before() -> None:
    relay, router = RankRelay(RANK, 100), KVIndexer()
    router.watch(RANK)
    stored = BlockStored([1, 2], None, [0, 1, 2, 3], SIZE, Tier.GPU)
    steps: list[list[EngineEvent]] = [[stored, WindowStored([1, 2], SIZE, 0, 1)], [WindowStored([2], SIZE, 1, 1)]]
    found = []
    for step in steps:
        for batch in relay.apply(EngineBatch(0.0, None, step, {})):
            router.on_batch(batch)
        found.append(
            [router.find_matches(hash_prompt(prompt, [SIZE], PLAIN)).get(RANK) for prompt in ([0, 1], [0, 1, 2, 3])]
        )
    assert found == [[(1, 1), (2, 2)], [None, (2, 2)]]


def told(*steps: list[EngineEvent]) -> KVIndexer:
    """What a router knows after these steps of an engine's."""
    relay, router = RankRelay(RANK, 100), KVIndexer()
    router.watch(RANK)
    for step in steps:
        for batch in relay.apply(EngineBatch(0.0, None, step, {})):
            router.on_batch(batch)
    return router


def test_a_cleared_cache_holds_no_window_either_even_where_that_was_all_it_still_held() -> None:
    stored = BlockStored([1, 2], None, [0, 1, 2, 3], SIZE, Tier.GPU)
    window = WindowStored([1, 2], SIZE, 0, 1)
    router = told([stored, window], [BlockRemoved([1, 2], Tier.GPU)], [AllBlocksCleared()], [stored])
    assert not router.find_matches(hash_prompt([0, 1, 2, 3], [SIZE], PLAIN))


def test_a_clear_amid_a_step_takes_what_came_before_it_and_leaves_what_came_after() -> None:
    stored = BlockStored([1, 2], None, [0, 1, 2, 3], SIZE, Tier.GPU)
    one, both = WindowStored([1], SIZE, 0, 1), WindowStored([1, 2], SIZE, 0, 1)
    for before, after, blocks in ((both, one, 1), (one, both, 2)):
        router = told([stored, before, AllBlocksCleared(), stored, after])
        assert router.find_matches(hash_prompt([0, 1, 2, 3], [SIZE], PLAIN))[RANK].blocks == blocks


def test_a_prompts_end_within_a_block_says_nothing_of_the_size_of_blocks() -> None:
    """Where it ends so early within the block that what it follows is known."""
    stored = BlockStored([1, 2], None, [0, 1, 2, 3], SIZE, Tier.GPU)
    end = BlockStored([3], 2, [4], 1, Tier.GPU)
    router = told([stored, end, WindowStored([1], SIZE, 0, 1)])
    assert router.find_matches(hash_prompt([0, 1, 2, 3], [SIZE], PLAIN))[RANK].blocks == 1
