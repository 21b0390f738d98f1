"""What vLLM's events of stored blocks are on the wire."""

from __future__ import annotations

import msgspec

from engines.kv_wire import StoredBlocks


class Stored(StoredBlocks, tag="BlockStored", gc=False):
    lora_name: str | None = None
    extra_keys: list[list[msgspec.Raw] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class StoredArray(Stored, array_like=True, tag="BlockStored"):
    pass
