"""When each owner's blocks expire: a dictionary in the order of expiry, in packed arrays.

All lives have the same length, so whatever is stored or renewed expires last, and the order is a doubly linked list.
Blocks are found by open addressing with linear probing. Most of a prompt's hundreds of blocks are renewals, which took
0.6 µs each in a Python dictionary (docs/adr/0004-compiled-kernels.md).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.hashing import SequenceHashes
from indexer.jit import loop

Owners: TypeAlias = npt.NDArray[np.int64]
Nodes: TypeAlias = npt.NDArray[np.int64]
"""A row for each life or free entry; row 0 is the list's head and tail."""
Places: TypeAlias = npt.NDArray[np.int32]
"""The hash table: the row found at each place; 0: none."""
State: TypeAlias = npt.NDArray[np.int64]

_SMALLEST: Final = 64
_PLACES: Final = 2
"""Places of the hash table for each row."""
BYTES_PER_LIFE: Final = 3 * (5 * 8 + _PLACES * 4)
"""At most: while the rows are being doubled there are three for each life."""

_MIX = np.uint64(0xD6E8FEB86659FD93)
_SALT = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)

# Columns of a row, and indices of `State`.
_BLOCK, _OWNER, _END, _BEFORE, _AFTER = range(5)
_COUNT, _FREE, _SINK = range(3)


class Lives:
    """Owners are small integers; times are integers in any unit."""

    def __init__(self) -> None:
        self._nodes = np.zeros((_SMALLEST, 5), np.int64)
        self._places = np.zeros(_PLACES * _SMALLEST, np.int32)
        self._state = np.zeros(3, np.int64)
        _offer(self._nodes, self._state, 1)

    def __len__(self) -> int:
        return int(self._state[_COUNT])

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes + self._places.nbytes

    @property
    def first_end(self) -> int | None:
        """When the first life ends; None if there are none."""
        return int(self._nodes[self._nodes[0, _AFTER], _END]) if len(self) else None

    def renew(self, owner: int, blocks: SequenceHashes, end: int) -> None:
        """Let `owner` have `blocks` until `end`, which must not be before any earlier `end`."""
        while len(self) + len(blocks) >= len(self._nodes):
            self._grow()
        _renew(self._nodes, self._places, self._state, owner, blocks, end)

    def ended(self, now: int) -> int:
        """How many lives have ended."""
        return _ended(self._nodes, now)

    def take(self, many: int) -> tuple[SequenceHashes, Owners]:
        """Remove the `many` lives that end first; returns their blocks and owners."""
        blocks, owners = np.empty(many, np.uint64), np.empty(many, np.int64)
        _take(self._nodes, self._places, self._state, blocks, owners)
        return blocks, owners

    def forget(self, owner: int) -> None:
        _forget(self._nodes, self._places, self._state, owner)

    def _grow(self) -> None:
        used = len(self._nodes)
        nodes = np.zeros((2 * used, 5), np.int64)
        nodes[:used] = self._nodes
        self._nodes, self._places = nodes, np.zeros(2 * len(self._places), np.int32)
        _offer(nodes, self._state, used)
        _refill(nodes, self._places)


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after."""
    lives = Lives()
    lives.renew(0, np.arange(_SMALLEST, dtype=np.uint64), 1)
    lives.take(lives.ended(1))
    lives.forget(0)


@loop
def _offer(nodes: Nodes, state: State, first: int) -> None:
    """Put the rows from `first` on into the free list."""
    for node in range(first, len(nodes)):
        nodes[node, _AFTER] = state[_FREE]
        state[_FREE] = node


# Finding


@loop
def _home(places: Places, owner: int, block: int) -> int:
    key = (np.uint64(block) ^ (np.uint64(owner) * _SALT)) * _MIX
    return int(np.int64(key >> _32)) & (len(places) - 1)


@loop
def _place(nodes: Nodes, places: Places, owner: int, block: int) -> int:
    """Where the life is found, or the empty place where it belongs."""
    at = _home(places, owner, block)
    while places[at] and (nodes[places[at], _BLOCK] != block or nodes[places[at], _OWNER] != owner):
        at = (at + 1) & (len(places) - 1)
    return at


@loop
def _close_up(nodes: Nodes, places: Places, hole: int) -> None:
    """Empties a place, and moves entries behind it up that probing would not find any more."""
    mask = len(places) - 1
    at = (hole + 1) & mask
    while places[at]:
        node = places[at]
        if (at - _home(places, nodes[node, _OWNER], nodes[node, _BLOCK])) & mask >= (at - hole) & mask:
            places[hole] = node
            hole = at
        at = (at + 1) & mask
    places[hole] = 0


@loop
def _refill(nodes: Nodes, places: Places) -> None:
    node = nodes[0, _AFTER]
    while node:
        places[_place(nodes, places, nodes[node, _OWNER], nodes[node, _BLOCK])] = node
        node = nodes[node, _AFTER]


# The list


@loop
def _unlink(nodes: Nodes, node: int) -> None:
    before, after = nodes[node, _BEFORE], nodes[node, _AFTER]
    nodes[before, _AFTER], nodes[after, _BEFORE] = after, before


@loop
def _put_last(nodes: Nodes, node: int) -> None:
    last = nodes[0, _BEFORE]
    nodes[node, _BEFORE], nodes[node, _AFTER] = last, 0
    nodes[last, _AFTER] = nodes[0, _BEFORE] = node


@loop
def _touch(nodes: Nodes, places: Places, state: State, owner: int, blocks: SequenceHashes) -> None:
    """Touches all rows first, so that their cache misses overlap: big tables are in no cache."""
    read = 0
    for block in blocks:
        read ^= nodes[places[_home(places, owner, int(np.int64(block)))], _BLOCK]
    state[_SINK] = read  # so that the reads are not optimised away


@loop
def _renew(nodes: Nodes, places: Places, state: State, owner: int, blocks: SequenceHashes, end: int) -> None:
    _touch(nodes, places, state, owner, blocks)
    for block in blocks:
        name = int(np.int64(block))
        at = _place(nodes, places, owner, name)
        node = int(places[at])
        if node:
            _unlink(nodes, node)
        else:
            node = int(state[_FREE])
            state[_FREE] = nodes[node, _AFTER]
            state[_COUNT] += 1
            nodes[node, _BLOCK], nodes[node, _OWNER] = name, owner
            places[at] = node
        nodes[node, _END] = end
        _put_last(nodes, node)


@loop
def _ended(nodes: Nodes, now: int) -> int:
    many, node = 0, nodes[0, _AFTER]
    while node and nodes[node, _END] <= now:
        many += 1
        node = nodes[node, _AFTER]
    return many


@loop
def _drop(nodes: Nodes, places: Places, state: State, node: int) -> None:
    _close_up(nodes, places, _place(nodes, places, nodes[node, _OWNER], nodes[node, _BLOCK]))
    _unlink(nodes, node)
    nodes[node, _AFTER] = state[_FREE]
    state[_FREE] = node
    state[_COUNT] -= 1


@loop
def _take(nodes: Nodes, places: Places, state: State, blocks: SequenceHashes, owners: Owners) -> None:
    for i in range(len(blocks)):
        node = nodes[0, _AFTER]
        blocks[i], owners[i] = np.uint64(nodes[node, _BLOCK]), nodes[node, _OWNER]
        _drop(nodes, places, state, node)


@loop
def _forget(nodes: Nodes, places: Places, state: State, owner: int) -> None:
    node = nodes[0, _AFTER]
    while node:
        after = nodes[node, _AFTER]
        if nodes[node, _OWNER] == owner:
            _drop(nodes, places, state, node)
        node = after
