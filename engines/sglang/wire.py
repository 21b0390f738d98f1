"""What SGLang's events of stored blocks are on the wire."""

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
    cache_salt: str | None = None
    lora_name: str | None = None


class Metadata(msgspec.Struct, gc=False):
    cache_salt: str | None = None


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: msgspec.Raw
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    metadata: Metadata | None = None
