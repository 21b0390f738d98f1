"""GET /router/hot: the prefixes that are asked for most, and where they lie. Hashes and counts, never a token."""

from __future__ import annotations

import msgspec
import numpy as np

from indexer.kv_indexer import KVIndexer, PromptHashes
from router.store.hot_prefixes import HALF_LIFE, HotPrefix
from router.store.lookup import StoreLookup
from router.store.shared_store import SharedStore

PATH = "/router/hot"
MOST = 50
"""Prefixes of each model."""


class Hot(msgspec.Struct, frozen=True):
    hash: str
    """The router's own, of the prefix' last block."""
    tokens: int
    asked: float
    """How many requests had it; those before the last half-life count half, and so on."""
    on_gpu: list[str]
    """Ranks, as worker#dp_rank."""
    below_gpu: list[str]
    store_keys: list[str]
    """Keys of the last block's objects; [] where they are not known any more."""
    seen_in_store: float | None
    """Seconds since a look-up found it there; None: none did recently."""


class HotModel(msgspec.Struct, frozen=True):
    model: str
    block_size: int
    prefixes: list[Hot]


class HotPage(msgspec.Struct, frozen=True):
    half_life_seconds: float
    models: list[HotModel]


def hot_page(store: SharedStore, indexer: KVIndexer, now: float) -> HotPage:
    models = [
        HotModel(model, lookup.block_size, [_hot(one, lookup, indexer, now) for one in hottest])
        for model, lookup, hottest in store.hottest(MOST, now)
    ]
    return HotPage(HALF_LIFE, models)


def _hot(one: HotPrefix, lookup: StoreLookup, indexer: KVIndexer, now: float) -> Hot:
    size, last = lookup.block_size, np.array([one.sequence_hash], np.uint64)
    holders = indexer.find_matches(PromptHashes(size, {size: last}))
    return Hot(
        hash=f"{one.sequence_hash:016x}",
        tokens=one.blocks * size,
        asked=round(one.asked, 2),
        on_gpu=sorted(str(rank) for rank, overlap in holders.items() if overlap.gpu_blocks),
        below_gpu=sorted(str(rank) for rank, overlap in holders.items() if not overlap.gpu_blocks),
        store_keys=list(lookup.keys_of(one.sequence_hash)),
        seen_in_store=lookup.seen(one.sequence_hash, now),
    )
