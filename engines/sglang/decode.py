"""SGLang's KV events (sglang/srt/disaggregation/kv_events.py): maps since 0.5.20, before that arrays.

In arrays the salt comes in a map of its own behind the medium, and there is no LoRA name.
"""

from __future__ import annotations

import msgspec

from engines.events import EngineBatch
from engines.kv_events import (
    CLEARED,
    Cleared,
    ClearedArray,
    Outcome,
    Removed,
    RemovedArray,
    decode_frame,
    is_map,
    removed,
    stored,
)
from indexer.types import EngineHash, Namespace, Tier

TIERS: dict[str | None, Tier] = {"GPU": Tier.GPU, "CPU_PINNED": Tier.CPU, "DISK": Tier.DISK, None: Tier.GPU}
"""By medium (StorageMedium). EXTERNAL, a pool shared by several workers, is left out: it is none of this worker's."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    cache_salt: str | None = None


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    metadata: _Metadata | None = None


_map = msgspec.msgpack.Decoder(_Stored | Removed | Cleared)
_array = msgspec.msgpack.Decoder(_StoredArray | RemovedArray | ClearedArray)


def decode(payload: bytes) -> EngineBatch:
    """One frame. Raises MalformedEvent, and nothing else, when it cannot be read."""
    return decode_frame(payload, _event)


def _event(packed: msgspec.Raw) -> Outcome:
    event = (_map if is_map(packed) else _array).decode(packed)
    if isinstance(event, Cleared):
        return CLEARED
    if isinstance(event, Removed):
        return removed(event, TIERS)
    return _stored(event)


def _stored(event: _Stored | _StoredArray) -> Outcome:
    tier = TIERS.get(event.medium)
    if tier is None:
        return "medium"
    namespace = _namespace(event)
    if event.lora_id is not None and namespace.lora_name is None:
        return "lora"
    return stored(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, tier, namespace)


def _namespace(event: _Stored | _StoredArray) -> Namespace:
    if isinstance(event, _Stored):
        return Namespace(event.lora_name, event.cache_salt)
    return Namespace(cache_salt=event.metadata.cache_salt if event.metadata else None)
