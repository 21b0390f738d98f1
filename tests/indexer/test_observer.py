"""Who counts blocks is told of each once, whatever the event plane does, and of nothing that only a snapshot says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from indexer.events import Cleared, EventBatch, LoadReport, Removed, Stored, pack_hashes
from indexer.hash_kernels import ONE_IN
from indexer.hashing import SequenceHashes
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.observer import Cause
from indexer.sampling import sample
from indexer.types import PLAIN, Tier, WorkerRank

A, B = WorkerRank("a", 0), WorkerRank("b", 0)


class Told:
    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def stored(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes, created: int) -> None:
        self.all.append(("stored", rank.worker_id, tier.name, hashes.tolist(), created))

    def removed(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes) -> None:
        self.all.append(("removed", rank.worker_id, tier.name, hashes.tolist()))

    def dropped(self, rank: WorkerRank, blocks: Mapping[Tier, int], cause: Cause) -> None:
        if any(blocks.values()):
            self.all.append((cause, rank.worker_id, {tier.name: count for tier, count in blocks.items() if count}))

    def __call__(self) -> list[tuple[Any, ...]]:
        """Since the last time."""
        told, self.all = self.all, []
        return told


def watching(ttl: float = 10.0) -> tuple[KVIndexer, Told]:
    told = Told()
    indexer = KVIndexer(ttl, observer=told)
    indexer.watch(A)
    indexer.watch(B)
    return indexer, told


def stored(*hashes: int, tier: Tier = Tier.GPU) -> Stored:
    return Stored(tier, pack_hashes(hashes))


def removed(*hashes: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed(tier, pack_hashes(hashes))


def batch(
    number: int,
    *events: Stored | Removed | Cleared,
    rank: WorkerRank = A,
    epoch: int = 1,
    part: int = 0,
    parts: int = 0,
) -> EventBatch:
    return EventBatch(*rank, epoch, number, list(events), part, parts)


def test_blocks_that_no_rank_held_in_that_tier_are_created() -> None:
    indexer, told = watching()
    indexer.on_batch(batch(0, stored(1, 2, 3)))
    assert told() == [("stored", "a", "GPU", [1, 2, 3], 3)]
    indexer.on_batch(batch(0, stored(2, 3, 4), rank=B))
    assert told() == [("stored", "b", "GPU", [2, 3, 4], 1)]
    indexer.on_batch(batch(1, stored(1, tier=Tier.CPU)))
    assert told() == [("stored", "a", "CPU", [1], 1)]
    indexer.on_batch(batch(2, removed(2)))
    indexer.on_batch(batch(3, stored(2)))
    assert told() == [("removed", "a", "GPU", [2]), ("stored", "a", "GPU", [2], 0)]


def test_many_blocks_at_once_are_all_counted() -> None:
    indexer, told = watching()
    indexer.on_batch(batch(0, stored(*range(1, 5001))))
    indexer.on_batch(batch(0, stored(*range(2501, 7501)), rank=B))
    assert [(entry[1], entry[4]) for entry in told()] == [("a", 5000), ("b", 2500)]


def test_what_is_lost_is_told_when_it_has_come_again_and_what_comes_twice_once() -> None:
    indexer, told = watching()
    indexer.on_batch(batch(0, stored(1)))
    indexer.on_batch(batch(2, removed(1)))
    indexer.on_batch(batch(0, stored(1)))
    assert told() == [("stored", "a", "GPU", [1], 1)]
    indexer.on_batch(batch(1, stored(2)))
    assert told() == [("stored", "a", "GPU", [2], 1), ("removed", "a", "GPU", [1])]


def test_what_a_rank_did_before_it_was_followed_is_not_told() -> None:
    indexer, told = watching()
    events: list[Stored | Removed | Cleared] = [stored(1), removed(1), stored(2), Cleared(), stored(3, 4)]
    indexer.on_batch(EventBatch(*A, 1, 0, events, past=True))
    assert told() == []
    assert indexer.index.blocks(A, Tier.GPU) == 2
    indexer.on_batch(batch(1, stored(5), removed(3)))
    assert told() == [("stored", "a", "GPU", [5], 1), ("removed", "a", "GPU", [3])]


def test_a_cleared_cache_and_a_new_epoch_are_told_apart() -> None:
    indexer, told = watching()
    indexer.on_batch(batch(0, stored(1, 2), stored(1, tier=Tier.DISK)))
    told()
    indexer.on_batch(batch(1, Cleared(), stored(5)))
    assert told() == [("cleared", "a", {"GPU": 2, "DISK": 1}), ("stored", "a", "GPU", [5], 1)]
    indexer.on_batch(batch(0, epoch=2))
    assert told() == [("expired", "a", {"GPU": 1})]
    indexer.on_batch(batch(1, stored(6), epoch=2))
    told()
    indexer.forget(A)
    assert told() == [("expired", "a", {"GPU": 1})]


def test_a_snapshot_is_no_news() -> None:
    indexer, told = watching()
    indexer.on_batch(batch(0, stored(1, 2)))
    told()
    indexer.on_report(LoadReport(*A, 1, 5, True))
    assert indexer.on_report(LoadReport(*A, 1, 5, True)), "a replay is asked for"
    indexer.on_batch(batch(5, stored(2, 3), part=0, parts=1))
    assert told() == []
    assert indexer.index.blocks(A, Tier.GPU) == 2
    indexer.on_replay_end(A)
    indexer.on_batch(batch(6, removed(3)))
    assert told() == [("removed", "a", "GPU", [3])]


def test_assumptions_expire() -> None:
    indexer, told = watching(ttl=10.0)
    prompt = hash_prompt(list(range(48)), {16}, PLAIN)
    indexer.predict(A, prompt.chain(16), now=100.0)
    indexer.expire(105.0)
    assert told() == []
    indexer.expire(110.0)
    assert told() == [("expired", "a", {"GPU": 3})]
    indexer.predict(A, prompt.chain(16), now=120.0)
    indexer.worker_restarted(A)
    assert told() == [("expired", "a", {"GPU": 3})]


def test_a_sample_is_the_same_share_of_blocks_wherever_they_come() -> None:
    hashes = np.arange(1000 * ONE_IN, dtype=np.uint64)
    sampled = sample(hashes, 1)
    assert len(sampled) == pytest.approx(1000, rel=0.1)
    assert sample(np.frombuffer(hashes.tobytes(), np.uint64)[::-1].copy(), 1) == sampled[::-1]
    assert sample(hashes[:0], 1) == []


def test_nobody_can_have_more_than_a_share_of_blocks_in_the_sample_without_the_secret() -> None:
    """A client can choose tokens so that each of its blocks has a hash that is in the sample of another secret, or has
    the same lowest bits."""
    hashes = np.random.default_rng(1).integers(0, 2**64, 1000 * ONE_IN, np.uint64)
    for chosen in (np.array(sample(hashes, 1), np.uint64), hashes * np.uint64(ONE_IN)):
        for secret in (0x1F3D5B79A2C4E608, 0x7E1B20C6D3A59F41):
            assert len(sample(chosen, secret)) < 2 * len(chosen) // ONE_IN
