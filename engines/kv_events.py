"""What the KV event codecs of vLLM and SGLang share.

Both publish one msgpack frame per message: `[timestamp, [event, …], dp_rank]`. An event is a map with a `type`, or in
older versions an array whose first element is that type. A frame that cannot be read is an error; one event that cannot
be read, or that says nothing about the engine's own prefix cache, is skipped and counted, and the others survive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import msgspec

from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBatch, EngineEvent, MalformedEvent
from indexer.types import EngineHash, Namespace, Tier

Reason = Literal[
    "malformed",  # not what the protocol says
    "unknown_type",  # an event of a kind that is not known here
    "medium",  # held where it is worth nothing, or where the worker is not its only owner
    "group",  # an attention group whose cached blocks make no prefix (sliding window, Mamba, …)
    "tokens",  # blocks without their tokens: nothing to hash
    "bigrams",  # EAGLE's pairs of tokens
    "lora",  # a LoRA adapter known by number only
]

Outcome: TypeAlias = EngineEvent | Reason
"""The event, or why it is none of the index's business."""

UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for bad input: its errors and UnicodeDecodeError are ValueErrors; nesting has Python's limit."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
"""Both engines' token ids fit 32 bits (SGLang hashes them as u32), and so do ours in `indexer.hashing`."""

_tokens = msgspec.msgpack.Decoder(list[_Token])
_bigrams = msgspec.msgpack.Decoder(list[tuple[_Token, _Token]])


class _Frame(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _MapFrame(msgspec.Struct, gc=False):
    """vLLM's frame between the switch to maps and 0.32, where the frame is an array again."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Tagged(msgspec.Struct):
    """Any event as a map, read for its type only."""

    type: str


class TaggedArray(Tagged, array_like=True):
    """Any event as an array, read for its type only."""


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """BlockRemoved on the wire; SGLang has the first two fields only."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class RemovedArray(Removed, array_like=True, tag="BlockRemoved"):
    pass


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """AllBlocksCleared on the wire."""


class ClearedArray(Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


_map_frame = msgspec.msgpack.Decoder(_MapFrame)
_array_frame = msgspec.msgpack.Decoder(_Frame)
_map_tag = msgspec.msgpack.Decoder(Tagged)
_array_tag = msgspec.msgpack.Decoder(TaggedArray)


def is_map(packed: bytes | msgspec.Raw) -> bool:
    """Whether a msgpack value begins as a map: fixmap, map 16 or map 32."""
    first = memoryview(packed)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def decode_frame(payload: bytes, decode_event: Callable[[msgspec.Raw], Outcome]) -> EngineBatch:
    """Read a frame and each of its events with `decode_event`, which may raise UNREADABLE for one of them.

    Raises MalformedEvent when the frame itself cannot be read.
    """
    timestamp, packed_events, dp_rank = _read_frame(payload)
    events: list[EngineEvent] = []
    skipped: Counter[str] = Counter()
    for packed in packed_events:
        outcome = _outcome(packed, decode_event)
        if isinstance(outcome, str):
            skipped[outcome] += 1
        else:
            events.append(outcome)
    return EngineBatch(timestamp, dp_rank, events, dict(skipped))


def _read_frame(payload: bytes) -> tuple[float, list[msgspec.Raw], int | None]:
    try:
        if is_map(payload):
            mapped = _map_frame.decode(payload)
            frame = (mapped.ts, mapped.events, mapped.data_parallel_rank)
        else:
            array = _array_frame.decode(payload)
            frame = (array.ts, array.events, array.dp_rank)
    except UNREADABLE as error:
        raise MalformedEvent(f"a KV event frame that cannot be read: {error}") from error
    if not math.isfinite(frame[0]):
        raise MalformedEvent("a KV event frame without a finite timestamp")
    return frame


def _outcome(packed: msgspec.Raw, decode_event: Callable[[msgspec.Raw], Outcome]) -> Outcome:
    try:
        return decode_event(packed)
    except UNREADABLE:
        return (
            "malformed"
            if _type_of(packed) in ("BlockStored", "BlockRemoved", "AllBlocksCleared", None)
            else "unknown_type"
        )


def _type_of(packed: msgspec.Raw) -> str | None:
    try:
        return (_map_tag if is_map(packed) else _array_tag).decode(packed).type
    except UNREADABLE:
        return None


def stored(
    engine_hashes: list[EngineHash],
    parent: EngineHash | None,
    packed_tokens: msgspec.Raw,
    block_size: int,
    tier: Tier,
    namespace: Namespace,
    extras: tuple[bytes, ...] = (),
) -> Outcome:
    """A BlockStored whose tokens are read last, when all else says that they are worth reading."""
    try:
        tokens = _tokens.decode(packed_tokens)
    except msgspec.ValidationError:
        _bigrams.decode(packed_tokens)
        return "bigrams"
    if not engine_hashes or block_size < 1 or len(tokens) != len(engine_hashes) * block_size:
        return "tokens"
    return BlockStored(engine_hashes, parent, tokens, block_size, tier, namespace, extras)


def removed(event: Removed, tiers: dict[str | None, Tier]) -> Outcome:
    """A BlockRemoved of a medium that counts."""
    tier = tiers.get(event.medium)
    return "medium" if tier is None else BlockRemoved(event.block_hashes, tier)


CLEARED = AllBlocksCleared()
