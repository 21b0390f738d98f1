"""The frames and events of `engines.kv_events` as they are on the wire."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from indexer.types import EngineHash

_Event = TypeVar("_Event")


class Frame(msgspec.Struct, Generic[_Event], array_like=True, gc=False):
    ts: float
    events: list[_Event]
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class MapFrame(msgspec.Struct, gc=False):
    """A frame that names its fields, as vLLM's events do since 0.24. Its releases up to 0.33 send arrays."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Tagged(msgspec.Struct):
    """Any event as a map, read for its type only."""

    type: str


class TaggedArray(Tagged, array_like=True):
    """Any event as an array, read for its type only."""


class StoredBlocks(msgspec.Struct, tag="BlockStored", gc=False):
    """BlockStored on the wire, as far as all engines begin it alike."""

    block_hashes: msgspec.Raw
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """BlockRemoved on the wire; SGLang has the first two fields only."""

    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class RemovedArray(Removed, array_like=True, tag="BlockRemoved"):
    pass


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """AllBlocksCleared on the wire."""


class TierCleared(msgspec.Struct, tag="TierBlocksCleared", gc=False):
    """vLLM's TierBlocksCleared on the wire, with `tier_scoped_clear_events` (vllm/config/kv_events.py)."""

    medium: str | None = None


class ClearedArray(Cleared, array_like=True, tag="AllBlocksCleared"):
    pass
