"""What SGLang's events of stored blocks are on the wire."""

from __future__ import annotations

import msgspec

from engines.kv_wire import StoredBlocks


class Stored(StoredBlocks, tag="BlockStored", gc=False):
    cache_salt: str | None = None
    lora_name: str | None = None


class Metadata(msgspec.Struct, gc=False):
    cache_salt: str | None = None


class StoredArray(StoredBlocks, array_like=True, tag="BlockStored", gc=False):
    metadata: Metadata | None = None
