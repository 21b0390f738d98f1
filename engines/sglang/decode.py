"""SGLang's KV events (sglang/srt/disaggregation/kv_events.py): maps since 0.5.20, before that arrays.

In arrays the salt comes in a map of its own behind the medium, and there is no LoRA name.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from engines.events import EngineBatch
from engines.kv_events import (
    CLEARED,
    Cleared,
    ClearedArray,
    Codec,
    Outcome,
    Removed,
    RemovedArray,
    read_hashes,
    read_tokens,
    removed,
    stored,
)
from engines.numbers import Numbers
from indexer.types import EngineHash, Namespace, Tier

TIERS: dict[str | None, Tier] = {"GPU": Tier.GPU, "CPU_PINNED": Tier.CPU, "DISK": Tier.DISK, None: Tier.GPU}
"""By medium (StorageMedium). EXTERNAL, a pool shared by several workers, is left out: it is none of this worker's."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: msgspec.Raw
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
    block_hashes: msgspec.Raw
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    metadata: _Metadata | None = None


_Event: TypeAlias = _Stored | _StoredArray | Removed | Cleared
_codec: Codec[_Event] = Codec(_Stored | Removed | Cleared, _StoredArray | RemovedArray | ClearedArray)  # type: ignore[arg-type]


def decode(payload: bytes) -> EngineBatch:
    """One frame. Raises MalformedEvent, and nothing else, when it cannot be read."""
    return _codec.decode(payload, _event)


def _event(event: _Event, numbers: Numbers) -> Outcome:
    if isinstance(event, Cleared):
        return CLEARED
    if isinstance(event, Removed):
        return removed(event, numbers, TIERS)
    return _stored(event, numbers)


def _stored(event: _Stored | _StoredArray, numbers: Numbers) -> Outcome:
    tier = TIERS.get(event.medium)
    if tier is None:
        return "medium"
    namespace = _namespace(event)
    if event.lora_id is not None and namespace.lora_name is None:
        return "lora"
    hashes, tokens = read_hashes(event.block_hashes, numbers), read_tokens(event.token_ids, numbers)
    return stored(hashes, event.parent_block_hash, tokens, event.block_size, tier, namespace)


def _namespace(event: _Stored | _StoredArray) -> Namespace:
    if isinstance(event, _Stored):
        return Namespace(event.lora_name, event.cache_salt)
    return Namespace(cache_salt=event.metadata.cache_salt if event.metadata else None)
