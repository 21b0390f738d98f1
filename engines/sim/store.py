"""A KV store that all workers of a fleet share, as Mooncake's: blocks by hash, in memory that its owners lend.

Blocks are evicted one by one, so of a prefix the middle may go, and the first that is missing ends it. A put of what is
there changes nothing. Time enters only as `now`, which never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from indexer.types import SequenceHash

Eviction = Literal["fifo", "lru", "sieve"]
"""What goes first: the oldest; the least recently used; the oldest not used since it was last passed over (SIEVE, Zhang
and others 2024)."""
Owner = Hashable


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start, in blocks."""

    stored: int = 0
    evicted: int = 0
    expired: int = 0
    reused: int = 0
    """Loaded."""
    lost: int = 0
    """With their last owner."""


class _Entry:
    """A block, between an older and a newer one."""

    __slots__ = ("born", "key", "newer", "older", "owners", "used")

    def __init__(self, key: SequenceHash, owner: Owner, born: float) -> None:
        self.key = key
        self.owners = [owner]
        self.born = born
        self.used = False
        self.older = self.newer = self


class Store:
    """`capacity` blocks, copies counted. A block expires `ttl_s` after it was put, whatever happens to it."""

    def __init__(self, capacity: int, eviction: Eviction = "lru", ttl_s: float | None = None) -> None:
        self.capacity = capacity
        self.counters = StoreCounters()
        self._eviction = eviction
        self._ttl = ttl_s
        self._entries: dict[SequenceHash, _Entry] = {}
        self._ends = _Entry(0, None, 0.0)
        """Its `newer` is the oldest entry, its `older` the newest."""
        self._hand = self._ends
        """Where SIEVE looks next."""
        self._copies = 0
        self._births: OrderedDict[SequenceHash, float] = OrderedDict()
        """In the order of their expiring, with a time to live."""

    def __repr__(self) -> str:
        return f"<Store {self._eviction}, {self._copies} of {self.capacity} blocks>"

    def __len__(self) -> int:
        """Blocks held, copies counted."""
        return self._copies

    def prefix(self, hashes: Sequence[SequenceHash], now: float) -> int:
        """How many leading ones are here. Asking changes nothing."""
        entries = self._entries
        oldest = self._oldest_alive(now)
        for count, key in enumerate(hashes):
            entry = entries.get(key)
            if entry is None or entry.born <= oldest:
                return count
        return len(hashes)

    def take(self, hashes: Sequence[SequenceHash], now: float, held: int = 0) -> int:
        """As `prefix`, for somebody who has the first `held` himself and loads the others."""
        self._expire(now)
        found = self.prefix(hashes, now)
        for key in hashes[:found]:
            entry = self._entries[key]
            entry.used = True
            if self._eviction == "lru":
                self._unlink(entry)
                self._link(entry)
        self.counters.reused += max(0, found - held)
        return found

    def put(self, hashes: Iterable[SequenceHash], owner: Owner, now: float) -> list[SequenceHash]:
        """Those that are missing, in this order; returns them."""
        self._expire(now)
        if not self.capacity:
            return []
        put = []
        for key in hashes:
            if key not in self._entries:
                self._make_room()
                self._add(_Entry(key, owner, now))
                put.append(key)
        return put

    def copy(self, key: SequenceHash, owner: Owner, now: float) -> bool:
        """A copy of the block with a further owner; False when it is not here, or with that owner already."""
        self._expire(now)
        entry = self._entries.get(key)
        if entry is None or owner in entry.owners:
            return False
        self._make_room()
        if key not in self._entries:  # nothing else was left to evict
            return False
        entry.owners.append(owner)
        self._copies += 1
        self.counters.stored += 1
        return True

    def fail(self, owner: Owner) -> int:
        """The owner is gone, and its copies with it; how many blocks were lost."""
        lost = 0
        for entry in [entry for entry in self._entries.values() if owner in entry.owners]:
            if len(entry.owners) == 1:
                self._remove(entry)
                lost += 1
            else:
                entry.owners.remove(owner)
                self._copies -= 1
        self.counters.lost += lost
        return lost

    def _oldest_alive(self, now: float) -> float:
        """What was born then or before has expired."""
        return float("-inf") if self._ttl is None else now - self._ttl

    def _expire(self, now: float) -> None:
        if self._ttl is None:
            return
        oldest = self._oldest_alive(now)
        dead: list[SequenceHash] = []
        for key, born in self._births.items():
            if born > oldest:
                break
            dead.append(key)
        for key in dead:
            self.counters.expired += self._remove(self._entries[key])

    def _make_room(self) -> None:
        while self._copies >= self.capacity:
            self.counters.evicted += self._remove(self._victim())

    def _victim(self) -> _Entry:
        if self._eviction != "sieve":
            return self._ends.newer
        hand = self._hand
        while hand is self._ends or hand.used:
            hand.used = False
            hand = hand.newer
        self._hand = hand
        return hand

    def _add(self, entry: _Entry) -> None:
        self._entries[entry.key] = entry
        self._link(entry)
        self._copies += 1
        self.counters.stored += 1
        if self._ttl is not None:
            self._births[entry.key] = entry.born

    def _remove(self, entry: _Entry) -> int:
        """How many copies there were."""
        if self._hand is entry:
            self._hand = entry.newer
        self._unlink(entry)
        del self._entries[entry.key]
        self._births.pop(entry.key, None)
        self._copies -= len(entry.owners)
        return len(entry.owners)

    def _link(self, entry: _Entry) -> None:
        """As the newest."""
        last = self._ends.older
        entry.older, entry.newer = last, self._ends
        last.newer = self._ends.older = entry

    def _unlink(self, entry: _Entry) -> None:
        entry.older.newer, entry.newer.older = entry.newer, entry.older
