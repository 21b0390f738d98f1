"""Which prefixes are asked for most: a bounded count that forgets, with hashes and numbers only.

Space-Saving (Metwally, Agrawal, El Abbadi 2005): where there is no room, the least counted makes place for a new one,
which takes over its count as what it may be wrong by. Prompts are looked at where their beginning ends with the first,
second, fourth, eighth … block, and not beyond the first of these that was not counted yet: a prompt like no other costs
one entry, and a prefix of 2^n blocks has been asked for n times before it is known whole. Pure.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import Final, NamedTuple

from indexer.hashing import SequenceHashes
from indexer.types import SequenceHash

CAPACITY: Final = 2048
"""Prefixes; each costs some 300 bytes."""
HALF_LIFE: Final = 600.0
"""Seconds after which all counts are halved."""
_LEAST: Final = 2.0
"""Times asked, below which nothing is hot."""


class HotPrefix(NamedTuple):
    sequence_hash: SequenceHash
    """Of its last block, which stands for all before it."""
    blocks: int
    asked: float
    """Times, at least; those before the last `HALF_LIFE` count half, and so on."""


class _Entry:
    __slots__ = ("blocks", "count", "error", "key", "parent")

    def __init__(self, key: SequenceHash, blocks: int, parent: SequenceHash | None, error: float) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.count = error + 1.0
        self.error = error


class HotPrefixes:
    """`now`: seconds on a steady clock."""

    def __init__(self, capacity: int = CAPACITY, half_life: float = HALF_LIFE) -> None:
        self._capacity = capacity
        self._half_life = half_life
        self._entries: dict[SequenceHash, _Entry] = {}
        self._least: list[tuple[float, SequenceHash]] = []
        """A heap with one item for each entry, whose count was that or less."""
        self._halved: float | None = None
        self._ranked: list[HotPrefix] | None = None
        """What `hottest` told last, of all; None: something was counted since, or halved."""

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, chain: SequenceHashes, now: float) -> int:
        """Somebody asked for a prompt with these sequence hashes; returns how many of its blocks were known before."""
        self._decay(now)
        self._ranked = None
        blocks, parent = 1, None
        while blocks <= len(chain):
            key = int(chain[blocks - 1])
            entry = self._entries.get(key)
            if entry is None:
                self._insert(key, blocks, parent)
                break
            entry.count += 1.0
            blocks, parent = 2 * blocks, key
        return blocks // 2

    def hottest(self, number: int, now: float) -> list[HotPrefix]:
        """The first `number` prefixes by times asked × length. A prefix is left out if more than half of the requests
        for it were for one longer prefix that is counted too.

        That takes milliseconds. Workers that leave together ask at the same moment: it is worked out once for all.
        """
        self._decay(now)
        if self._ranked is None:
            self._ranked = self._rank()
        return self._ranked[:number]

    def _rank(self) -> list[HotPrefix]:
        longest: dict[SequenceHash, float] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                longest[entry.parent] = max(longest.get(entry.parent, 0.0), entry.count - entry.error)
        hot = [
            HotPrefix(entry.key, entry.blocks, asked)
            for entry in self._entries.values()
            if (asked := entry.count - entry.error) >= _LEAST and longest.get(entry.key, 0.0) <= asked / 2
        ]
        return sorted(hot, key=lambda one: (-one.asked * one.blocks, one.sequence_hash))

    def _insert(self, key: SequenceHash, blocks: int, parent: SequenceHash | None) -> None:
        error = 0.0 if len(self._entries) < self._capacity else self._drop_least()
        entry = self._entries[key] = _Entry(key, blocks, parent, error)
        heappush(self._least, (entry.count, key))

    def _drop_least(self) -> float:
        """Drop the entry with the least count, and return that count. Items of entries that were asked for since they
        were put into the heap are moved to where they belong by now."""
        while True:
            count, key = self._least[0]
            entry = self._entries[key]
            if entry.count == count:
                heappop(self._least)
                del self._entries[key]
                return count
            heapreplace(self._least, (entry.count, key))

    def _decay(self, now: float) -> None:
        if self._halved is None:
            self._halved = now
        times = int((now - self._halved) / self._half_life)
        if times < 1:
            return
        self._halved += times * self._half_life
        self._ranked = None
        factor = 0.5**times  # exact, so that the heap's order and its items stay right
        for entry in self._entries.values():
            entry.count *= factor
            entry.error *= factor
        self._least = [(count * factor, key) for count, key in self._least]
