"""vLLM's KV events (vllm/distributed/kv_events.py): maps since 0.24, before that arrays of the same fields."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from engines.events import BlockCopied, EngineBatch, WindowRemoved, WindowStored
from engines.kv_events import (
    CLEARED,
    Codec,
    Outcome,
    read_hashes,
    read_tokens,
    removed,
    stored,
)
from engines.kv_wire import Cleared, ClearedArray, Removed, RemovedArray, TierCleared
from engines.numbers import Numbers
from engines.vllm.wire import Stored, StoredArray
from indexer.events import LARGEST_COUNT
from indexer.handles import BlockNames
from indexer.types import PLAIN, Namespace, Tier

TIERS: dict[str | None, Tier] = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    None: Tier.GPU,
}
"""By medium, as the engine spells it. What is STORAGE in 0.30 is FS or OBJ in 0.26. Lower-case `cpu` comes from the
Mooncake store connector: such a block is the store's, not the worker's, and its removal is never published. None comes
from engines older than the field."""

PREFIX_GROUPS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""vLLM's KVCacheSpecKind whose blocks all stay needed, so that holding them is holding a prefix; None: not stated."""
_SLIDING = frozenset({"sliding_window", "sliding_window_mla"})


_Event: TypeAlias = Stored | Removed | Cleared | TierCleared
_codec: Codec[_Event] = Codec(_Event, StoredArray | RemovedArray | ClearedArray)  # type: ignore[arg-type]
_string = msgspec.msgpack.Decoder(str)


class Decoder:
    """Decodes the frames of one engine rank, in order.

    A hybrid model's groups store blocks under the same hashes, and a removal names its group by number alone, so the
    numbers of the groups that make no prefix are remembered from their stores, with their windows.

    What KV offloading stores in CPU memory has no tokens, unless `self_describing_kv_events` is set: the last block of
    each chunk is named by its hash alone (`_placeholder_stored` in
    vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py). So is what SimpleCPUOffloadConnector stores of
    blocks whose request has ended (vllm/v1/simple_kv_offload/manager.py).
    """

    def __init__(self) -> None:
        self._other_groups: set[int] = set()
        self._windows: dict[int, tuple[int, int]] = {}
        """By group: tokens in a block, and how many blocks the group looks back over."""

    def __call__(self, payload: bytes) -> EngineBatch:
        """Raises MalformedEvent, and nothing else, for a frame that cannot be read."""
        return _codec.decode(payload, self._event)

    def _event(self, event: _Event, numbers: Numbers) -> Outcome:
        if isinstance(event, Cleared):
            return CLEARED
        if isinstance(event, TierCleared):
            # What a connector keeps in other tiers stays, but is forgotten here until it is stored again, as after the
            # AllBlocksCleared that vLLM sends otherwise.
            return CLEARED if TIERS.get(event.medium) is Tier.GPU else "medium"
        if event.locality == "REMOTE":  # held by another machine (vllm/v1/kv_offload/base.py)
            return "medium"
        if isinstance(event, Removed):
            return self._removed(event, numbers)
        return self._stored(event, numbers)

    def _removed(self, event: Removed, numbers: Numbers) -> Outcome:
        if event.group_idx not in self._other_groups:
            return removed(event, numbers, TIERS)
        tier = TIERS.get(event.medium)
        if event.group_idx not in self._windows or tier is None:
            return "group"
        return WindowRemoved(read_hashes(event.block_hashes, numbers), event.group_idx, tier)

    def _stored(self, event: Stored, numbers: Numbers) -> Outcome:
        if not self._makes_prefix(event):
            return self._window(event, numbers)
        tier = TIERS.get(event.medium)
        if tier is None:
            return "medium"
        hashes = read_hashes(event.block_hashes, numbers)
        tokens = read_tokens(event.token_ids, numbers)
        if not len(tokens) and tier is not Tier.GPU:
            return self._copied(event.group_idx, hashes, tier)
        if _is_of_lmcache(event):
            return "medium"
        if event.lora_id is not None and event.lora_name is None:
            return "lora"
        namespace, extras = _namespace_and_extras(event, len(hashes))
        return stored(hashes, event.parent_block_hash, tokens, event.block_size, tier, namespace, extras)

    def _copied(self, group: int | None, hashes: BlockNames, tier: Tier) -> Outcome:
        if group is None or group not in self._other_groups:
            return BlockCopied(hashes, tier)
        if group not in self._windows:
            return "group"
        block_size, window = self._windows[group]
        return WindowStored(hashes, block_size, group, window, tier)

    def _window(self, event: Stored, numbers: Numbers) -> Outcome:
        window, tier = _window_blocks(event), TIERS.get(event.medium)
        if event.group_idx is None or window < 1 or tier is None:
            return "group"
        if tier is Tier.GPU:
            self._windows[event.group_idx] = event.block_size, window
        return WindowStored(read_hashes(event.block_hashes, numbers), event.block_size, event.group_idx, window, tier)

    def _makes_prefix(self, event: Stored) -> bool:
        makes_prefix = event.kv_cache_spec_kind in PREFIX_GROUPS or _is_mixed(event)
        if event.group_idx is not None and event.kv_cache_spec_kind is not None:
            (self._other_groups.discard if makes_prefix else self._other_groups.add)(event.group_idx)
        return makes_prefix


def decode(payload: bytes) -> EngineBatch:
    """One frame by itself; see Decoder for what only a sequence of frames can tell. Raises MalformedEvent."""
    return Decoder()(payload)


def _is_of_lmcache(event: Stored) -> bool:
    """Whether LMCache tells of it (lmcache_connector.py, and its own lmcache_mp_connector.py): that a chunk, which
    several engines may share, is stored, and never that it is gone. What vLLM itself moves to CPU memory, with its
    tokens, comes with its group or locality."""
    return event.medium == "CPU" and event.group_idx is None and event.locality is None


def _is_mixed(event: Stored) -> bool:
    """Whether the event is of the only group of a model whose layers all look back over all, and are of several kinds:
    MLA with a drafter of full attention, say. Up to 0.26 at least that has no kind (UniformTypeKVCacheSpecs)."""
    return event.kv_cache_spec_kind == "unknown" and event.group_idx == 0 and event.kv_cache_spec_sliding_window is None


def _window_blocks(event: Stored) -> int:
    """How many blocks before a token layers of the event's kind need, to go on from there (`find_longest_cache_hit` in
    vllm/v1/core/single_type_kv_cache_manager.py); 0 where that is no such number.

    The token itself is one of a sliding window's. Of Mamba's state only the last is kept.
    """
    if event.kv_cache_spec_kind == "mamba":
        return 1
    tokens = event.kv_cache_spec_sliding_window
    if event.kv_cache_spec_kind not in _SLIDING or tokens is None or tokens > LARGEST_COUNT or event.block_size < 1:
        return 0
    return -(-(tokens - 1) // event.block_size)


def _namespace_and_extras(event: Stored, blocks: int) -> tuple[Namespace, tuple[bytes, ...]]:
    """Tell apart what vLLM mixes into one untagged list for each block.

    In order: the LoRA name, `[multimodal id, offset in block]` pairs, in a prompt's first block the `cache_salt`,
    digests of prompt embeddings as bytes (vllm/v1/core/kv_cache_utils.py, `to_event_extra_keys`).
    """
    if not event.extra_keys or not any(event.extra_keys):
        return PLAIN if event.lora_name is None else Namespace(event.lora_name), ()
    if len(event.extra_keys) != blocks:
        raise ValueError("extra keys and block hashes do not agree in number")
    keys = [[bytes(key) for key in block or ()] for block in event.extra_keys]
    if event.lora_name is not None:
        for block in keys:
            _take_out(block, event.lora_name)
    salt = _take_salt(keys[0]) if event.parent_block_hash is None else None
    extras = tuple(b"".join(block) for block in keys)  # each key is msgpack, which says where it ends
    return Namespace(event.lora_name, salt), extras if any(extras) else ()


def _take_out(block: list[bytes], text: str) -> None:
    packed = msgspec.msgpack.encode(text)
    if packed in block:
        block.remove(packed)


def _take_salt(block: list[bytes]) -> str | None:
    """The last plain string: older versions put bare multimodal ids before it."""
    strings = [key for key in block if _is_string(key)]
    if not strings:
        return None
    salt = _string.decode(strings[-1])
    block.remove(strings[-1])
    return salt


def _is_string(packed: bytes) -> bool:
    """Whether a msgpack value is a fixstr, str 8, str 16 or str 32."""
    return b"\xa0" <= packed[:1] <= b"\xbf" or packed[:1] in (b"\xd9", b"\xda", b"\xdb")
