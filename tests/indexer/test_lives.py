"""Lives in packed arrays, against an ordered dictionary."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from indexer.handle_kernels import names_of
from indexer.lives import BYTES_PER_LIFE, Lives, _home

OWNERS = 3
LENGTH = 100
"""Of one life."""


@pytest.mark.parametrize("blocks", [100, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_an_ordered_dictionary(seed: int, blocks: int) -> None:
    draw, lives, now = random.Random(seed), Lives(), 0
    expected: OrderedDict[tuple[int, int], int] = OrderedDict()
    names = [draw.getrandbits(64) for _ in range(blocks)]
    for _ in range(300):
        now += draw.randrange(10)
        owner, some = draw.randrange(OWNERS), draw.choices(names, k=draw.randrange(60))
        lives.renew(owner, np.array(some, np.uint64), now + LENGTH)
        for name in reversed(some):
            expected[owner, name] = now + LENGTH
            expected.move_to_end((owner, name))
        if draw.random() < 0.02:
            lives.forget(owner)
            expected = OrderedDict((key, end) for key, end in expected.items() if key[0] != owner)
        many = sum(end <= now for end in expected.values())
        assert lives.ended(now) == many
        gone, owners = lives.take(many)
        assert list(zip(owners.tolist(), gone.tolist(), strict=True)) == [
            expected.popitem(last=False)[0] for _ in range(many)
        ]
        assert len(lives) == len(expected)
        assert lives.first_end == next(iter(expected.values()), None)
    assert expected


@pytest.mark.parametrize("seed", range(4))
def test_each_owner_may_have_an_order_of_its_own(seed: int) -> None:
    draw, lives = random.Random(seed), Lives()
    expected: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(OWNERS)]
    orders = [0] * OWNERS
    names = [draw.getrandbits(64) for _ in range(500)]
    for turn in range(300):
        owner, some = draw.randrange(OWNERS), draw.choices(names, k=draw.randrange(60))
        held, before = expected[owner], len(expected[owner])
        for name in reversed(some):
            held[name] = None
            held.move_to_end(name)
        assert lives.renew(owner, np.array(some, np.uint64), turn, orders[owner]) == len(held) - before
        if turn > 50 and not orders[owner]:
            orders[owner] = lives.new_order()
            assert lives.move(owner, orders[owner]) == len(held)
        if orders[owner]:
            many = draw.randrange(len(held) // 4 + 1)
            gone, owners = lives.take(many, orders[owner])
            assert gone.tolist() == [held.popitem(last=False)[0] for _ in range(many)]
            assert set(owners.tolist()) <= {owner}
        if draw.random() < 0.02:
            lives.forget(owner, orders[owner])
            held.clear()
            if orders[owner]:
                lives.close_order(orders[owner])
                orders[owner] = 0
        assert len(lives) == sum(map(len, expected))
    assert any(expected)


def test_it_grows_with_all_its_orders_and_a_closed_one_makes_room() -> None:
    lives, names = Lives(), np.arange(1000, dtype=np.uint64)
    orders = [lives.new_order() for _ in range(200)]
    assert len({0, *orders}) == 201
    few = [(owner, names[:2], 1, order) for owner, order in enumerate(orders, 1)]
    assert [lives.renew(*each) for each in few] == [2] * 200
    lives.renew(0, names, 1)
    assert [lives.renew(*each) for each in few] == [0] * 200
    for owner, order in enumerate(orders, 1):
        lives.forget(owner, order)
        lives.close_order(order)
    assert lives.rows == len(lives) == 1000


def test_it_takes_no_more_memory_than_it_says() -> None:
    lives = Lives()
    for first in range(0, 20_000, 100):
        lives.renew(0, np.arange(first, first + 100, dtype=np.uint64), first)
        assert lives.nbytes <= max(BYTES_PER_LIFE * len(lives), Lives().nbytes)
    for _ in range(50):  # what is forgotten makes room
        full = lives.nbytes
        lives.take(20_000)
        lives.renew(1, np.arange(20_000, dtype=np.uint64), 0)
        assert lives.nbytes == full


@pytest.mark.parametrize(("secret", "crowded"), [(0, True), (0x1F3D5B79A2C4E608, False)])
def test_nobody_can_crowd_blocks_in_one_place_without_the_secret(secret: int, crowded: bool) -> None:
    keys = np.arange(77 << 55, 78 << 55, (1 << 55) // 2000, dtype=np.uint64)
    lives = Lives(secret)
    lives.renew(0, names_of(keys, 0), 1)  # keys are made in the same way
    places = np.flatnonzero(lives._places)
    blocks = lives._nodes[lives._places[places], 0]
    homes = [_home(lives._nodes, lives._places, 0, int(block)) for block in blocks]
    steps = (places - np.array(homes)) % len(lives._places)
    assert (steps.max() > 1000) == crowded
    assert (steps.max() < 100) != crowded
