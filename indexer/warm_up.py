"""Compiles the index's kernels before the first request."""

from __future__ import annotations

from functools import cache

import indexer.lives
import indexer.prefix_index
import indexer.sampling
from indexer.events import EventBatch, Removed, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier, WorkerRank


@cache
def warm_up() -> None:
    """Takes seconds the first time on a machine, a fraction of one after, no time again in the same process. Not to be
    called while serving.

    Hashes of a batch are read-only, which is a type of its own to the compiler.
    """
    indexer.lives.warm_up()
    indexer.prefix_index.warm_up()
    indexer.sampling.warm_up()
    subject, packed = KVIndexer(), pack_hashes([1])
    store, remove = Stored(Tier.GPU, packed), Removed(Tier.GPU, packed)
    for dp_rank in range(2):
        subject.watch(WorkerRank("", dp_rank))
        subject.on_batch(EventBatch("", dp_rank, 0, 0, [store, remove, store]))
    subject.forget(WorkerRank("", 1))  # whose blocks are swept out with the next
    subject.on_batch(EventBatch("", 0, 0, 1, [store]))
