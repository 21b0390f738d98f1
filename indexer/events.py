"""The messages on the event plane: msgpack arrays, one `EventBatch` or `LoadReport` per message.

Publishers turn their engine's hashes into sequence hashes. So no token id leaves the engine's host, and the router
applies a batch without hashing anything (docs/adr/0002-hashes-on-the-event-plane.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from indexer.hashing import HASH_VERSION, SequenceHashes
from indexer.types import SequenceHash, Tier, WorkerRank

LARGEST_COUNT = 2**31 - 1
"""Limit of any count from an engine: blocks times their tokens then still fit 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]


class Stored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="s"):
    """The worker now holds these blocks in `tier`; `hashes` as made by `pack_hashes`.

    `window` > 0: in the layers that look back over so many blocks only, whatever the tier. A worker that has ever sent
    such an event, even without hashes, can continue a prompt only where these layers hold that many blocks before, or
    all.
    """

    tier: Tier
    hashes: bytes
    window: Count = 0


class Removed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="r"):
    """The worker's last copy of each of these blocks in `tier` is gone; with a `window`, from one of the layers with
    it."""

    tier: Tier
    hashes: bytes
    window: Count = 0


class Cleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="c"):
    """The worker no longer holds anything in any tier."""


Event = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one (worker, dp_rank), in order.

    `event_id` counts batches from 0 within an `epoch`; a new epoch (always greater) starts from an empty cache. Parts
    of a snapshot, `part` = 0 … `parts` − 1, share the id of the last batch they include; `parts` = 0 is an ordinary
    batch.
    """

    worker_id: str
    dp_rank: int
    epoch: int
    event_id: int
    events: list[Event]
    part: int = 0
    parts: int = 0
    hash_version: int = HASH_VERSION
    past: bool = False
    """Whether the engine did it before its publisher followed it."""

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.worker_id, self.dp_rank)


NO_EVENTS = -1


class LoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Load of one (worker, dp_rank) as its engine states it; None where the engine does not.

    `epoch` and `event_id` name the last batch published before this report (event_id = −1: none), so that a receiver
    that missed it notices without waiting for the next event. `exact` is False while the publisher's own view of the
    engine is incomplete (events were lost that the engine could not replay). Where no events are published at all,
    `epoch` is NO_EVENTS.
    """

    worker_id: str
    dp_rank: int
    epoch: int
    event_id: int
    exact: bool
    num_requests_waiting: Count | None = None
    gpu_cache_usage_perc: float | None = None
    """0–1."""
    gpu_prefix_cache_hit_rate: float | None = None
    """0–1, since the engine started."""
    request_active_slots: Count | None = None
    """Requests running."""
    request_total_slots: Count | None = None
    kv_active_blocks: Count | None = None
    kv_total_blocks: Count | None = None
    lora_total_slots: Count | None = None
    """LoRA adapters that run at once."""

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.worker_id, self.dp_rank)


class ReplayRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks a publisher for the batches of `epoch` from `event_id` on; it answers with those, or with a snapshot."""

    worker_id: str
    dp_rank: int
    epoch: int
    event_id: int


def pack_hashes(hashes: Sequence[SequenceHash] | SequenceHashes) -> bytes:
    """Little-endian u64 each."""
    if isinstance(hashes, np.ndarray) and sys.byteorder == "little":
        return hashes.tobytes()
    return np.asarray(hashes, dtype="<u8").tobytes()


def unpack_hashes(packed: bytes) -> SequenceHashes:
    """Inverse of `pack_hashes`; ValueError when the length is not a multiple of 8."""
    hashes = np.frombuffer(packed, dtype="<u8")
    return hashes if sys.byteorder == "little" else hashes.astype(np.uint64)


encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
decode_load = msgspec.msgpack.Decoder(LoadReport).decode
decode_replay_request = msgspec.msgpack.Decoder(ReplayRequest).decode
