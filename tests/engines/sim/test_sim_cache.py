"""The prefix cache against a plain model: a list in LRU order, a Counter of references, a dict of contents."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.sim.cache import Cleared, PrefixCache, Removed, Stored
from indexer.types import Namespace
from tests.examples import examples

CAPACITY = 12
PLAIN = Namespace()


class CacheMachine(RuleBasedStateMachine):
    """Requests take prefixes of a few chains (hash = chain × 100 + depth), grow along them, and let go."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(CAPACITY)
        self.lru = list(range(CAPACITY))
        self.references: Counter[int] = Counter()
        self.contents: dict[int, int] = {}
        self.requests: list[tuple[int, list[int]]] = []
        self.published: Counter[int] = Counter()

    @rule(chain=st.integers(0, 2), wanted=st.integers(1, 5))
    def begin(self, chain: int, wanted: int) -> None:
        hashes = [chain * 100 + depth for depth in range(wanted)]
        held = self.cache.find(hashes)
        assert [self.contents[block] for block in held] == hashes[: len(held)]
        assert len(held) == wanted or hashes[len(held)] not in self.contents.values()
        assert self.cache.idle(held) == sum(not self.references[block] for block in held)
        self.cache.acquire(held)
        for block in held:
            if not self.references[block]:
                self.lru.remove(block)
            self.references[block] += 1
        self.requests.append((chain, held))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 5), store=st.booleans())
    def grow(self, data: st.DataObject, count: int, store: bool) -> None:
        chain, blocks = data.draw(st.sampled_from(self.requests))
        got = self.cache.allocate(count)
        if count > len(self.lru):
            assert got is None
            return
        assert got == self.lru[:count]  # the least recently freed first
        del self.lru[:count]
        for block in got:
            self.contents.pop(block, None)
            self.references[block] = 1
        first, all_named = len(blocks), all(block in self.contents for block in blocks)
        blocks += got
        if got and store and all_named:
            hashes = [chain * 100 + depth for depth in range(first, len(blocks))]
            self.cache.store(got, hashes, hashes[0] - 1 if first else None, [], PLAIN)
            self.contents |= dict(zip(got, hashes, strict=True))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        _, blocks = self.requests.pop(index)
        self.cache.release(blocks)
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.lru.append(block)

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == (len(self.lru) == CAPACITY)
        if len(self.lru) == CAPACITY:
            self.contents.clear()

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        assert self.cache.free_blocks == len(self.lru)
        assert self.cache.usage == pytest.approx(1 - len(self.lru) / CAPACITY)

    @invariant()
    def events_tell_the_contents(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, Stored):
                self.published.update(event.hashes)
            elif isinstance(event, Removed):
                self.published.subtract(event.hashes)
            else:
                self.published.clear()
        assert +self.published == Counter(self.contents.values())
        assert min(self.published.values(), default=0) >= 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def filled(cache: PrefixCache, hashes: list[int]) -> list[int]:
    blocks = cache.allocate(len(hashes))
    assert blocks is not None
    cache.store(blocks, hashes, None, [], PLAIN)
    return blocks


def test_tails_go_before_heads() -> None:
    cache = PrefixCache(4)
    cache.release(filled(cache, [1, 2, 3, 4]))
    cache.take_events()
    cache.allocate(2)
    assert cache.take_events() == [Removed([4, 3])]
    assert len(cache.find([1, 2, 3, 4])) == 2


def test_a_hash_held_twice_is_removed_twice() -> None:
    cache = PrefixCache(2)
    for blocks in [filled(cache, [7]), filled(cache, [7])]:
        cache.release(blocks)
    cache.take_events()
    assert cache.allocate(1) is not None
    assert cache.find([7])
    assert cache.allocate(1) is not None
    assert not cache.find([7])
    assert cache.take_events() == [Removed([7]), Removed([7])]


def test_blocks_in_use_keep_the_cache_from_being_cleared() -> None:
    cache = PrefixCache(2)
    blocks = filled(cache, [1])
    assert not cache.clear()
    assert cache.find([1]) == blocks
    cache.release(blocks)
    cache.take_events()
    assert cache.clear()
    assert cache.find([1]) == []
    assert cache.take_events() == [Cleared()]


def test_integrity_check_notices_a_lost_block() -> None:
    cache = PrefixCache(2)
    filled(cache, [1])
    cache._block.clear()
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_integrity_check_notices_a_wrong_reference() -> None:
    cache = PrefixCache(2)
    cache._references[0] = 1
    with pytest.raises(AssertionError):
        cache.check_integrity()
