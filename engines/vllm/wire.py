"""What vLLM's events of stored blocks are on the wire."""

from __future__ import annotations

import msgspec

from indexer.types import EngineHash


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: msgspec.Raw
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[msgspec.Raw] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class StoredArray(Stored, array_like=True, tag="BlockStored"):
    pass
