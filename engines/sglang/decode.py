"""SGLang's KV events (sglang/srt/disaggregation/kv_events.py): maps since 0.5.20, before that arrays.

In arrays the salt comes in a map of its own behind the medium, and there is no LoRA name.
"""

from __future__ import annotations

from typing import TypeAlias

from engines.events import EngineBatch
from engines.kv_events import (
    CLEARED,
    Codec,
    Outcome,
    read_hashes,
    read_tokens,
    removed,
    stored,
)
from engines.kv_wire import Cleared, ClearedArray, Removed, RemovedArray
from engines.numbers import Numbers
from engines.sglang.wire import Stored, StoredArray
from indexer.types import Namespace, Tier

TIERS: dict[str | None, Tier] = {"GPU": Tier.GPU, "CPU_PINNED": Tier.CPU, "DISK": Tier.DISK, None: Tier.GPU}
"""By medium (StorageMedium). EXTERNAL, a pool shared by several workers, is left out: it is none of this worker's."""


_Event: TypeAlias = Stored | StoredArray | Removed | Cleared
_codec: Codec[_Event] = Codec(Stored | Removed | Cleared, StoredArray | RemovedArray | ClearedArray)  # type: ignore[arg-type]


def decode(payload: bytes) -> EngineBatch:
    """One frame. Raises MalformedEvent, and nothing else, when it cannot be read."""
    return _codec.decode(payload, _event)


def _event(event: _Event, numbers: Numbers) -> Outcome:
    if isinstance(event, Cleared):
        return CLEARED
    if isinstance(event, Removed):
        return removed(event, numbers, TIERS)
    return _stored(event, numbers)


def _stored(event: Stored | StoredArray, numbers: Numbers) -> Outcome:
    tier = TIERS.get(event.medium)
    if tier is None:
        return "medium"
    namespace = _namespace(event)
    if event.lora_id is not None and namespace.lora_name is None:
        return "lora"
    hashes, tokens = read_hashes(event.block_hashes, numbers), read_tokens(event.token_ids, numbers)
    # A hybrid model's page in host memory is told again when its window or state follows it there, and leaves once
    # (0.5.23: `_backup_publish_node_ids` in mem_cache/unified_radix_cache.py).
    once = tier is not Tier.GPU
    return stored(hashes, event.parent_block_hash, tokens, event.block_size, tier, namespace, once=once)


def _namespace(event: Stored | StoredArray) -> Namespace:
    if isinstance(event, Stored):
        return Namespace(event.lora_name, event.cache_salt)
    return Namespace(cache_salt=event.metadata.cache_salt if event.metadata else None)
