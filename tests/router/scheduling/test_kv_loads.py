"""How long a rank loads, from times that tell of much else too; and who waits for whom."""

from __future__ import annotations

import random

import numpy as np
import pytest

from indexer.types import RankSet
from router.scheduling.kv_loads import KVLoad, KVLoads, Speed
from tests.router.scheduling.candidates import rank

A, B = rank("a"), rank("b")
BOTH = RankSet([A, B])


@pytest.mark.parametrize("factor", [0.05, 1.0, 100.0])
def test_noise_does_not_bend_what_is_learned(factor: float) -> None:
    speed, source = Speed(), random.Random(0)
    for _ in range(400):
        work = source.uniform(0.01, 1.0)
        speed.observe(work, factor * (work + source.gauss(0.0, 0.2)), 0.0)
    assert speed.factor(0.0) == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("seconds", [-1e9, 1e9])
def test_one_odd_observation_changes_little(seconds: float) -> None:
    speed = Speed()
    for _ in range(50):
        speed.observe(0.5, 1.0, 0.0)
    speed.observe(0.5, seconds, 0.0)
    assert 1.6 < speed.factor(0.0) < 2.4


def test_a_prior_that_is_far_off_is_soon_forgotten() -> None:
    speed = Speed()
    for _ in range(3):
        speed.observe(0.5, 50.0, 0.0)
    assert speed.factor(0.0) == pytest.approx(100.0, rel=0.1)


def test_what_is_learned_lasts_for_an_hour_and_one_stall_no_longer() -> None:
    """Whose loads seem endless is avoided, and could never show that they are not."""
    slow, stalled = Speed(), Speed()
    for turn in range(100):
        slow.observe(0.1, 2.0, 5.0 * turn)
    assert slow.factor(495.0 + 1_800.0) > 10
    stalled.observe(0.1, 5.0, 0.0)
    assert stalled.factor(0.0) > 30
    assert stalled.factor(3_600.0) < 2
    assert stalled.factor(1e9) == 1.0


def loads() -> KVLoads:
    found = KVLoads()
    for each in (A, B):
        found.watch(each)
    return found


def test_loads_of_one_rank_wait_for_each_other_and_for_nobody_elses() -> None:
    found = loads()
    own = found.own_seconds(np.array([1_000_000, 0]), 0.0)
    assert own[0] > 1
    assert own[1] == 0
    first = KVLoad(found, A, 1_000_000, 0.0)
    KVLoad(found, A, 1_000_000, 0.0)
    assert found.wait_seconds(BOTH, 0.0) == pytest.approx([2 * own[0], 0])
    assert (found.busy(BOTH, 0.0), found.tokens) == (0.5, {A: 2_000_000})
    first.drop(1.0)
    assert found.wait_seconds(BOTH, 1.0) == pytest.approx([own[0], 0])
    assert found.tokens == {A: 1_000_000}


def test_what_went_into_something_else_is_not_the_loads() -> None:
    found = loads()
    now = 0.0
    for _ in range(200):
        load = KVLoad(found, A, 100_000, now)
        now += 3.0
        load.done(now, 2.0)
    assert found.own_seconds(np.array([100_000]), now)[0] == pytest.approx(1.0, rel=0.05)


def test_the_second_of_two_is_timed_from_the_end_of_the_first() -> None:
    found = loads()
    for at in range(100):
        began = 10.0 * at
        one, two = (KVLoad(found, A, 100_000, began) for _ in range(2))
        one.done(began + 2.0, 0.0)
        two.done(began + 4.0, 0.0)
    assert found.own_seconds(np.array([100_000]), 1_000.0)[0] == pytest.approx(2.0, rel=0.05)
