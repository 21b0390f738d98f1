"""When each owner's blocks were last used and when they expire: a dictionary in orders of use, in packed arrays.

Each order is a doubly linked list with the least recently used life first. As all lives of an order have the same
length, that one also ends first. Blocks are found by open addressing with linear probing. Most of a prompt's hundreds
of blocks are renewals, which took 0.6 µs each in a Python dictionary (docs/adr/0004-compiled-kernels.md).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.hashing import SequenceHashes
from indexer.jit import loop

Owners: TypeAlias = npt.NDArray[np.int64]
Nodes: TypeAlias = npt.NDArray[np.int64]
"""A row for each life, order (its head and tail) or free entry; row 0 is the order that is always there, and
has the secret as its block."""
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
_1, _32 = np.uint64(1), np.uint64(32)

# Columns of a row, and indices of `State`.
_BLOCK, _OWNER, _END, _BEFORE, _AFTER = range(5)
_COUNT, _FREE, _SINK = range(3)


class Lives:
    """Owners are small integers; times are integers in any unit. There is an order 0; others are made."""

    def __init__(self, secret: int = 0) -> None:
        """`secret`: see `indexer.prefix_index.PrefixIndex`."""
        self._nodes = np.zeros((_SMALLEST, 5), np.int64)
        self._nodes[0, _BLOCK] = secret
        self._places = np.zeros(_PLACES * _SMALLEST, np.int32)
        self._state = np.zeros(3, np.int64)
        self._orders = {0}
        _offer(self._nodes, self._state, 1)

    def __len__(self) -> int:
        return int(self._state[_COUNT])

    @property
    def rows(self) -> int:
        """Lives, and orders beside the first."""
        return len(self) + len(self._orders) - 1

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes + self._places.nbytes

    @property
    def first_end(self) -> int | None:
        """When the first life of order 0 ends; None if there are none."""
        first = self._nodes[0, _AFTER]
        return int(self._nodes[first, _END]) if first else None

    def new_order(self) -> int:
        self._make_room(1)
        order = _open(self._nodes, self._state)
        self._orders.add(order)
        return order

    def renew(self, owner: int, blocks: SequenceHashes, end: int, order: int = 0) -> int:
        """Let `owner` have `blocks` until `end`, which must not be before any earlier `end` of that order. An owner's
        lives must all be of one order. The first block is used last. Returns how many lives are new."""
        self._make_room(len(blocks))
        before = len(self)
        _renew(self._nodes, self._places, self._state, owner, blocks, end, order)
        return len(self) - before

    def ended(self, now: int) -> int:
        """How many lives of order 0 have ended."""
        return _ended(self._nodes, now)

    def take(self, many: int, order: int = 0) -> tuple[SequenceHashes, Owners]:
        """Remove the order's `many` lives that were used least recently; returns their blocks and owners."""
        blocks, owners = np.empty(many, np.uint64), np.empty(many, np.int64)
        _take(self._nodes, self._places, self._state, blocks, owners, order)
        return blocks, owners

    def move(self, owner: int, order: int) -> int:
        """Move the owner's lives from order 0 to another one, as they follow each other; returns how many."""
        return _move(self._nodes, owner, order)

    def forget(self, owner: int, order: int = 0) -> None:
        """Remove all of the owner's lives, which are of that order."""
        _forget(self._nodes, self._places, self._state, owner, order)

    def close_order(self, order: int) -> None:
        """Remove an order with no lives."""
        self._orders.remove(order)
        _give_back(self._nodes, self._state, order)

    def _make_room(self, rows: int) -> None:
        while self.rows + rows >= len(self._nodes):
            self._grow()

    def _grow(self) -> None:
        used = len(self._nodes)
        nodes = np.zeros((2 * used, 5), np.int64)
        nodes[:used] = self._nodes
        self._nodes, self._places = nodes, np.zeros(2 * len(self._places), np.int32)
        _offer(nodes, self._state, used)
        _refill(nodes, self._places, np.array(list(self._orders), np.int64))


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after."""
    lives = Lives()
    lives.renew(0, np.arange(_SMALLEST, dtype=np.uint64), 1)
    lives.take(lives.ended(1))
    order = lives.new_order()
    lives.move(0, order)
    lives.forget(0, order)


@loop
def _offer(nodes: Nodes, state: State, first: int) -> None:
    """Put the rows from `first` on into the free list."""
    for node in range(first, len(nodes)):
        _give_back(nodes, state, node)


@loop
def _give_back(nodes: Nodes, state: State, node: int) -> None:
    nodes[node, _AFTER] = state[_FREE]
    state[_FREE] = node


@loop
def _take_free(nodes: Nodes, state: State) -> int:
    node = int(state[_FREE])
    state[_FREE] = nodes[node, _AFTER]
    return node


@loop
def _open(nodes: Nodes, state: State) -> int:
    """A new order, with nothing in it."""
    order = _take_free(nodes, state)
    nodes[order, _BEFORE] = nodes[order, _AFTER] = order
    return order


# Finding


@loop
def _home(nodes: Nodes, places: Places, owner: int, block: int) -> int:
    """As `indexer.kernels._key_of` does it, so that nobody can have thousands of blocks in one place."""
    secret = np.uint64(nodes[0, _BLOCK])
    key = (np.uint64(block) ^ secret ^ (np.uint64(owner) * _SALT)) * _MIX
    key = (key ^ (key >> _32)) * (secret | _1)
    return int(np.int64(((key >> _32) * np.uint64(len(places))) >> _32))


@loop
def _place(nodes: Nodes, places: Places, owner: int, block: int) -> int:
    """Where the life is found, or the empty place where it belongs."""
    at = _home(nodes, places, owner, block)
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
        if (at - _home(nodes, places, nodes[node, _OWNER], nodes[node, _BLOCK])) & mask >= (at - hole) & mask:
            places[hole] = node
            hole = at
        at = (at + 1) & mask
    places[hole] = 0


@loop
def _refill(nodes: Nodes, places: Places, orders: Owners) -> None:
    for order in orders:
        node = nodes[order, _AFTER]
        while node != order:
            places[_place(nodes, places, nodes[node, _OWNER], nodes[node, _BLOCK])] = node
            node = nodes[node, _AFTER]


# The lists


@loop
def _unlink(nodes: Nodes, node: int) -> None:
    before, after = nodes[node, _BEFORE], nodes[node, _AFTER]
    nodes[before, _AFTER], nodes[after, _BEFORE] = after, before


@loop
def _put_last(nodes: Nodes, node: int, order: int) -> None:
    last = nodes[order, _BEFORE]
    nodes[node, _BEFORE], nodes[node, _AFTER] = last, order
    nodes[last, _AFTER] = nodes[order, _BEFORE] = node


@loop
def _touch(nodes: Nodes, places: Places, state: State, owner: int, blocks: SequenceHashes) -> None:
    """Touches all rows first, so that their cache misses overlap: big tables are in no cache."""
    read = 0
    for block in blocks:
        read ^= nodes[places[_home(nodes, places, owner, int(np.int64(block)))], _BLOCK]
    state[_SINK] = read  # so that the reads are not optimised away


@loop
def _renew(
    nodes: Nodes, places: Places, state: State, owner: int, blocks: SequenceHashes, end: int, order: int
) -> None:
    _touch(nodes, places, state, owner, blocks)
    for i in range(len(blocks) - 1, -1, -1):
        name = int(np.int64(blocks[i]))
        at = _place(nodes, places, owner, name)
        node = int(places[at])
        if node:
            _unlink(nodes, node)
        else:
            node = _take_free(nodes, state)
            state[_COUNT] += 1
            nodes[node, _BLOCK], nodes[node, _OWNER] = name, owner
            places[at] = node
        nodes[node, _END] = end
        _put_last(nodes, node, order)


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
    _give_back(nodes, state, node)
    state[_COUNT] -= 1


@loop
def _take(nodes: Nodes, places: Places, state: State, blocks: SequenceHashes, owners: Owners, order: int) -> None:
    for i in range(len(blocks)):
        node = nodes[order, _AFTER]
        blocks[i], owners[i] = np.uint64(nodes[node, _BLOCK]), nodes[node, _OWNER]
        _drop(nodes, places, state, node)


@loop
def _move(nodes: Nodes, owner: int, order: int) -> int:
    many, node = 0, nodes[0, _AFTER]
    while node:
        after = nodes[node, _AFTER]
        if nodes[node, _OWNER] == owner:
            _unlink(nodes, node)
            _put_last(nodes, node, order)
            many += 1
        node = after
    return many


@loop
def _forget(nodes: Nodes, places: Places, state: State, owner: int, order: int) -> None:
    node = nodes[order, _AFTER]
    while node != order:
        after = nodes[node, _AFTER]
        if nodes[node, _OWNER] == owner:
            _drop(nodes, places, state, node)
        node = after
