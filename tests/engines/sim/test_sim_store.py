"""The shared store against a plain model, and what it forgets when."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim.store import Eviction, Store

EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
EACH = pytest.mark.parametrize("eviction", EVICTIONS)


def held(store: Store, now: float = 0.0, most: int = 100) -> list[int]:
    return [key for key in range(most) if store.prefix([key], now)]


class Plain:
    """The same in lists: slow and plain."""

    def __init__(self, capacity: int, eviction: Eviction, ttl: float | None) -> None:
        self.capacity, self.eviction, self.ttl = capacity, eviction, ttl
        self.order: list[int] = []
        """From the oldest."""
        self.owners: dict[int, list[int]] = {}
        self.born: dict[int, float] = {}
        self.used: set[int] = set()
        self.hand: int | None = None
        self.evicted = self.expired = self.lost = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.owners.values()))

    def alive(self, key: int, now: float) -> bool:
        return key in self.owners and (self.ttl is None or now < self.born[key] + self.ttl)

    def prefix(self, keys: list[int], now: float) -> int:
        found = 0
        while found < len(keys) and self.alive(keys[found], now):
            found += 1
        return found

    def expire(self, now: float) -> None:
        for key in [key for key in self.order if not self.alive(key, now)]:
            self.expired += self.drop(key)

    def drop(self, key: int) -> int:
        if key == self.hand:
            index = self.order.index(key)
            self.hand = self.order[index + 1] if index + 1 < len(self.order) else None
        self.order.remove(key)
        self.used.discard(key)
        del self.born[key]
        return len(self.owners.pop(key))

    def victim(self) -> int:
        if self.eviction != "sieve":
            return self.order[0]
        index = 0 if self.hand is None else self.order.index(self.hand)
        while self.order[index] in self.used:
            self.used.remove(self.order[index])
            index = (index + 1) % len(self.order)
        self.hand = self.order[index]
        return self.hand

    def make_room(self) -> None:
        while self.size >= self.capacity:
            self.evicted += self.drop(self.victim())

    def put(self, keys: list[int], owner: int, now: float) -> None:
        self.expire(now)
        for key in keys if self.capacity else []:
            if key not in self.owners:
                self.make_room()
                self.order.append(key)
                self.owners[key], self.born[key] = [owner], now

    def take(self, keys: list[int], now: float) -> int:
        self.expire(now)
        found = self.prefix(keys, now)
        for key in keys[:found]:
            self.used.add(key)
            if self.eviction == "lru":
                self.order.remove(key)
                self.order.append(key)
        return found

    def copy(self, key: int, owner: int, now: float) -> bool:
        self.expire(now)
        if key not in self.owners or owner in self.owners[key]:
            return False
        self.make_room()
        if key not in self.owners:
            return False
        self.owners[key].append(owner)
        return True

    def fail(self, owner: int) -> int:
        lost = 0
        for key, owners in list(self.owners.items()):
            if owners == [owner]:
                lost += self.drop(key)
            elif owner in owners:
                owners.remove(owner)
        self.lost += lost
        return lost


KEYS = st.lists(st.integers(0, 11), max_size=6)
OWNER = st.integers(0, 2)
DEED = st.one_of(
    st.tuples(st.just("put"), KEYS, OWNER),
    st.tuples(st.just("take"), KEYS, OWNER),
    st.tuples(st.just("copy"), KEYS, OWNER),
    st.tuples(st.just("fail"), KEYS, OWNER),
    st.tuples(st.just("ask"), KEYS, OWNER),
)


@given(
    eviction=st.sampled_from(EVICTIONS),
    capacity=st.integers(0, 8),
    ttl=st.sampled_from([None, 2.0, 5.0]),
    deeds=st.lists(DEED, max_size=60),
)
def test_it_does_what_a_plain_model_does(
    eviction: Eviction, capacity: int, ttl: float | None, deeds: list[tuple[str, list[int], int]]
) -> None:
    store, plain, reused = Store(capacity, eviction, ttl), Plain(capacity, eviction, ttl), 0
    for step, (deed, keys, owner) in enumerate(deeds):
        now = step / 2
        match deed:
            case "put":
                store.put(keys, owner, now)
                plain.put(keys, owner, now)
            case "take":
                found = plain.take(keys, now)
                reused += max(0, found - owner)
                assert store.take(keys, now, held=owner) == found
            case "copy":
                assert [store.copy(key, owner, now) for key in keys] == [plain.copy(key, owner, now) for key in keys]
            case "fail":
                assert store.fail(owner) == plain.fail(owner)
            case _:
                assert store.prefix(keys, now) == plain.prefix(keys, now)
        assert len(store) == plain.size <= capacity
        assert held(store, now, 12) == [key for key in range(12) if plain.alive(key, now)]
    counters = store.counters
    assert (counters.evicted, counters.expired, counters.lost) == (plain.evicted, plain.expired, plain.lost)
    assert counters.reused == reused


def test_what_goes_first() -> None:
    """Four blocks, of which the oldest and the third are used; two more come."""
    left = {}
    for eviction in EVICTIONS:
        store = Store(4, eviction)
        store.put([1, 2, 3, 4], "a", 0.0)
        store.take([1], 1.0)
        store.take([3], 1.0)
        store.put([5, 6], "a", 2.0)
        left[eviction] = held(store)
    assert left == {"fifo": [3, 4, 5, 6], "lru": [1, 3, 5, 6], "sieve": [1, 3, 5, 6]}


@EACH
def test_the_first_missing_block_ends_a_prefix(eviction: Eviction) -> None:
    store = Store(10, eviction)
    store.put([1, 2, 4, 5], "a", 0.0)
    assert (store.prefix([1, 2, 3, 4, 5], 0.0), store.prefix([4, 5], 0.0), store.prefix([], 0.0)) == (2, 2, 0)


@EACH
def test_no_capacity_holds_nothing(eviction: Eviction) -> None:
    store = Store(0, eviction)
    store.put([1, 2], "a", 0.0)
    assert (len(store), store.prefix([1], 0.0), store.copy(1, "b", 0.0)) == (0, 0, False)


@EACH
def test_a_copy_outlives_its_first_owner(eviction: Eviction) -> None:
    store = Store(10, eviction)
    store.put([1, 2], "a", 0.0)
    assert store.copy(1, "b", 0.0)
    assert not store.copy(1, "b", 0.0)
    assert len(store) == 3
    assert store.fail("a") == 1
    assert (held(store), len(store), store.counters.lost) == ([1], 1, 1)
    assert store.fail("b") == 1
    assert held(store) == []


@EACH
def test_blocks_expire_with_time_alone(eviction: Eviction) -> None:
    store = Store(10, eviction, ttl_s=5.0)
    store.put([1], "a", 0.0)
    store.put([2], "a", 3.0)
    store.take([1], 4.0)
    assert held(store, 4.9) == [1, 2]
    assert held(store, 5.0) == [2]
    assert store.counters.expired == 0, "asking changes nothing"
    store.put([1], "b", 6.0)
    assert (held(store, 6.0), store.counters.expired) == ([1, 2], 1)


def test_asking_keeps_nothing_alive() -> None:
    store = Store(2, "lru")
    store.put([1, 2], "a", 0.0)
    for _ in range(5):
        store.prefix([1], 1.0)
    store.put([3], "a", 2.0)
    assert held(store) == [2, 3]
