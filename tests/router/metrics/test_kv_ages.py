"""How long blocks live, when they are first used again and when copied, told from a sample that is never large."""

from __future__ import annotations

from indexer.types import Tier, WorkerRank
from router.metrics.kv_ages import BlockAges
from router.metrics.tallies import Histogram, histogram_family

A, B, C = WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 0)


def observed(histogram: Histogram) -> tuple[float, float]:
    """How many, and their sum."""
    family = histogram_family("x", "", (), [((), histogram)])
    samples = {sample.name: sample.value for sample in family.samples}
    return samples["x_count"], samples["x_sum"]


def test_a_life_is_from_stored_to_removed_in_its_tier() -> None:
    ages = BlockAges()
    ages.stored(A, Tier.GPU, [1, 2], 100.0)
    ages.stored(A, Tier.CPU, [1], 105.0)
    ages.removed(A, Tier.GPU, [1], 130.0)
    ages.removed(A, Tier.CPU, [1], 106.0)
    ages.removed(A, Tier.GPU, [9], 200.0)
    ages.removed(B, Tier.GPU, [2], 200.0)
    assert {tier: observed(lives) for tier, lives in ages.lives.items()} == {
        Tier.GPU: (1, 30),
        Tier.CPU: (1, 1),
        Tier.DISK: (0, 0),
    }
    assert len(ages) == 1


def test_the_first_reuse_counts_once_for_each_copy() -> None:
    ages = BlockAges()
    ages.stored(A, Tier.GPU, [1], 100.0)
    ages.stored(B, Tier.GPU, [1], 104.0)
    for now in (110.0, 120.0):
        ages.reused(A, [1, 7], now)
    ages.reused(B, [1], 110.0)
    assert observed(ages.first_reuse) == (2, 10 + 6)
    ages.removed(A, Tier.GPU, [1], 130.0)
    ages.stored(A, Tier.GPU, [1], 140.0)
    ages.reused(A, [1], 141.0)
    assert observed(ages.first_reuse) == (3, 17)


def test_a_copy_on_another_rank_is_told_with_how_late_it_came() -> None:
    ages = BlockAges()
    ages.stored(A, Tier.GPU, [1], 100.0)
    ages.stored(A, Tier.GPU, [1], 101.0)
    assert observed(ages.replication) == (0, 0), "of the same rank it is none"
    ages.stored(A, Tier.CPU, [1], 101.0)
    ages.stored(B, Tier.CPU, [1], 102.0)
    assert observed(ages.replication) == (0, 0), "nor in another tier"
    ages.stored(B, Tier.GPU, [1], 131.0)
    assert observed(ages.replication) == (1, 30)
    ages.stored(C, Tier.GPU, [1], 141.0)
    assert observed(ages.replication) == (2, 30 + 40), "from the first that is there"


def test_what_a_rank_lost_all_at_once_is_forgotten() -> None:
    ages = BlockAges()
    ages.stored(A, Tier.GPU, [1], 100.0)
    ages.emptied(A, 110.0)
    ages.reused(A, [1], 120.0)
    ages.stored(B, Tier.GPU, [1], 125.0)
    ages.removed(A, Tier.GPU, [1], 130.0)
    assert observed(ages.first_reuse) == observed(ages.replication) == observed(ages.lives[Tier.GPU]) == (0, 0)
    ages.stored(A, Tier.GPU, [1], 140.0)
    ages.removed(A, Tier.GPU, [1], 150.0)
    assert observed(ages.lives[Tier.GPU]) == (1, 10)


def test_of_workers_that_have_left_no_copy_is_known() -> None:
    ages = BlockAges()
    ages.stored(A, Tier.GPU, [1], 100.0)
    ages.emptied(A, 101.0)
    ages.keep({"b"})
    assert not len(ages)
    ages.stored(B, Tier.GPU, [1], 110.0)
    assert observed(ages.replication) == (0, 0)


def test_those_stored_first_are_forgotten_first() -> None:
    ages = BlockAges(most=3)
    for number in range(5):
        ages.stored(A, Tier.GPU, [number], float(number))
    assert len(ages) == 3
    ages.removed(A, Tier.GPU, range(5), 10.0)
    assert observed(ages.lives[Tier.GPU]) == (3, 8 + 7 + 6)
    assert not len(ages)
