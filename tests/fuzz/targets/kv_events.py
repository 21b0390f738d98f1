"""What engines publish: their KV events, from the frame to the batches that a router applies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from typing import Any

import engines.sglang.decode
import engines.vllm.decode
from engines.events import BlockStored, EngineBatch, MalformedEvent
from indexer.cursor import View
from indexer.events import LoadReport, decode_batch, encode
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier, WorkerRank
from publishers.rank import Decode
from publishers.relay import RankRelay
from tests.engines.recordings import payloads
from tests.engines.test_numbers import both_ways
from tests.fuzz.target import DEEP_MSGPACK, MSGPACK, Target, place

_RANK = WorkerRank("w", 0)
_SHORT = 4096
"""Bytes of a recorded frame: longer ones say the same of more blocks."""


def _vllm(data: bytes) -> Hashable:
    return _relayed(engines.vllm.decode.Decoder(), data)


def _sglang(data: bytes) -> Hashable:
    return _relayed(engines.sglang.decode.decode, data)


def _relayed(decode: Decode, data: bytes) -> Hashable:
    """Read, relayed and applied, twice: the second time is the same engine saying the same again."""
    try:
        batch = decode(data)
    except MalformedEvent as error:
        return place(error)
    assert math.isfinite(batch.timestamp)
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(event.engine_hashes) * event.block_size
    relay, index = RankRelay(_RANK, 1), _index()
    for _ in range(2):
        for made in relay.apply(batch):
            assert not index.on_batch(decode_batch(encode(made)))
    assert not index.counts["malformed"]
    assert len(relay) <= len(data)
    assert _held(index) == _held(_restored(relay))
    return _kinds(batch), tuple(batch.skipped.items()), relay.exact, relay.counts.orphans


def _index() -> KVIndexer:
    index = KVIndexer()
    index.watch(_RANK)
    return index


def _restored(relay: RankRelay) -> KVIndexer:
    """An index that joins later, and is given a snapshot."""
    index = _index()
    asked = index.on_report(LoadReport(*_RANK, relay.epoch, relay.event_id, relay.exact))
    for batch in relay.snapshot() if asked else ():
        index.on_batch(decode_batch(encode(batch)))
    index.on_replay_end(_RANK)
    assert index.view(_RANK) is not View.RECOVERING
    return index


def _held(index: KVIndexer) -> tuple[list[int], set[int]]:
    """Blocks by tier, and windows."""
    return [index.index.blocks(_RANK, tier) for tier in Tier], set(index.index.windows(_RANK))


def _kinds(batch: EngineBatch) -> Hashable:
    return tuple(dict.fromkeys(type(event).__name__ for event in batch.events)), batch.dp_rank is None


def _numbers(data: bytes) -> Hashable:
    """With the numbers taken out by compiled code a frame says what it says to msgspec."""
    short, long = both_ways(data)
    assert short == long
    return tuple(said if said == "malformed" else (len(said[2]), tuple(said[3].items())) for said in long)


def _seeds(*names: str) -> list[bytes]:
    """Recorded frames, and frames with the events of two, the second's in another medium."""
    frames = list(dict.fromkeys(frame for name in names for frame in payloads(name) if len(frame) < _SHORT))
    joined = [_joined(one, other) for one, other in itertools.pairwise(frames[:40])]
    return [*frames, *joined, *_hybrid(), MSGPACK.encode([math.nan, []]), b"\x93\x01\x91" + DEEP_MSGPACK[0]]


def _hybrid() -> list[bytes]:
    """A group of layers with a window before the one that looks back over all, and one with a state."""
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
    }
    stored |= {"block_size": 2, "medium": "GPU"}
    groups = [
        {**stored, "group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4},
        {**stored, "group_idx": 1, "kv_cache_spec_kind": "full_attention"},
        {**stored, "group_idx": 2, "kv_cache_spec_kind": "mamba", "block_hashes": [2]},
    ]
    gone = [{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": group} for group in range(3)]
    return [MSGPACK.encode([1.0, events, 0]) for events in (groups, [*groups, gone[0]], [*groups, *gone, *groups])]


def _joined(one: bytes, other: bytes) -> bytes:
    first, second = MSGPACK.decode(one), MSGPACK.decode(other.replace(b"GPU", b"CPU"))
    return MSGPACK.encode([first[0], first[1] + second[1], *first[2:]])


_WORDS = (
    *DEEP_MSGPACK, b"\xabBlockStored", b"\xacBlockRemoved", b"\xb0AllBlocksCleared", b"\xacblock_hashes", b"\xa4type",
    b"\xa9token_ids", b"\xaablock_size", b"\xa6medium", b"\xa3GPU", b"\xa3CPU", b"\xc0", b"\xcf" + b"\xff" * 8,
    b"\x90", b"\xd3\x80" + bytes(7), b"\xdd\xff\xff\xff\xff", b"\xdc\x00\x10", b"\xd7\x04" + bytes(8),
    b"\xd7\x08" + bytes(8), b"\xc4\x20" + b"h" * 32, b"\x93", b"\x80", b"\xcb\x7f\xf8" + bytes(6), b"\xc1",
    b"\xd9\xff", b"\x92\xcd\x01\x00\x07", b"\xa9group_idx", b"\xb2kv_cache_spec_kind", b"\xa5mamba",
    b"\xaesliding_window", b"\xbckv_cache_spec_sliding_window",
)  # fmt: skip

TARGETS = (
    Target("vllm-events", _vllm, lambda: _seeds("vllm-0.32.0", "vllm-0.32.0-mooncake"), _WORDS, MSGPACK, share=50),
    Target("sglang-events", _sglang, lambda: _seeds("sglang-0.5.23", "sglang-0.5.18"), _WORDS, MSGPACK, share=50),
    Target("event-numbers", _numbers, lambda: _seeds("vllm-0.32.0", "sglang-0.5.18"), _WORDS, MSGPACK, share=40),
)
