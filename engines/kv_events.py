"""What the KV event codecs of vLLM and SGLang share.

Both publish one msgpack frame per message: `[timestamp, [event, …], dp_rank]`. An event is a map with a `type`, or in
older versions an array whose first element is that type. A frame that cannot be read is an error; one event that cannot
be read, or that says nothing about the engine's own prefix cache, is skipped and counted, and the others survive. The
numbers, nearly all of a frame, are taken out before (`engines.numbers`); what they do not understand is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

import msgspec

from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBatch, EngineEvent, MalformedEvent
from engines.kv_wire import Frame, MapFrame, Removed, Tagged, TaggedArray
from engines.numbers import Numbers, take_out
from indexer.handles import BlockNames, block_names
from indexer.hashing import Tokens, pack_tokens
from indexer.types import EngineHash, Namespace, Tier

Reason = Literal[
    "malformed",  # not what the protocol says
    "unknown_type",  # an event of a kind that is not known here
    "medium",  # held where it is worth nothing, or where the worker is not its only owner
    "group",  # layers whose cached blocks say nothing of where a prompt may go on (cross attention, …)
    "tokens",  # blocks without their tokens: nothing to hash
    "lora",  # a LoRA adapter known by number only
]

Outcome: TypeAlias = EngineEvent | Reason
"""The event, or why it is none of the index's business."""


UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for bad input: its errors and UnicodeDecodeError are ValueErrors; nesting has Python's limit."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
"""Both engines' token ids fit 32 bits (SGLang hashes them as u32), and so do ours in `indexer.hashing`."""

_tokens = msgspec.msgpack.Decoder(list[_Token])
_hashes = msgspec.msgpack.Decoder(list[EngineHash])
_bigrams = msgspec.msgpack.Decoder(list[tuple[_Token, _Token]])


_Event = TypeVar("_Event")


_map_frame = msgspec.msgpack.Decoder(MapFrame)
_array_frame = msgspec.msgpack.Decoder(Frame[msgspec.Raw])
_map_tag = msgspec.msgpack.Decoder(Tagged)
_array_tag = msgspec.msgpack.Decoder(TaggedArray)


class Codec(Generic[_Event]):
    """Reads frames with events of the types `maps` or `arrays`, unions of tagged structs."""

    def __init__(self, maps: type[_Event], arrays: type[_Event]) -> None:
        self._map_events: msgspec.msgpack.Decoder[Frame[_Event]] = msgspec.msgpack.Decoder(Frame[maps])  # type: ignore[valid-type] # a type all the same
        self._map = msgspec.msgpack.Decoder(maps)
        self._array = msgspec.msgpack.Decoder(arrays)

    def decode(self, payload: bytes, judge: Callable[[_Event, Numbers], Outcome]) -> EngineBatch:
        """Read a frame, and have `judge`, which may raise UNREADABLE, say what each event means.

        Raises MalformedEvent when the frame itself cannot be read.
        """
        digest = take_out(payload)
        frame, numbers, stands_for = digest.frame, digest.numbers, digest.events
        found: Sequence[_Event | Reason]
        try:
            whole = self._map_events.decode(frame)
            timestamp, found, dp_rank = whole.ts, whole.events, whole.dp_rank
        except UNREADABLE:
            timestamp, packed, dp_rank = _read_frame(frame)
            found = [self._read(one) for one in packed]
        if not math.isfinite(timestamp):
            raise MalformedEvent("a KV event frame without a finite timestamp")
        events: list[EngineEvent] = []
        skipped: dict[str, int] = {}
        for at, event in enumerate(found):
            outcome = event if isinstance(event, str) else _judge(event, numbers, judge)
            if isinstance(outcome, str):
                skipped[outcome] = skipped.get(outcome, 0) + (stands_for[at] if stands_for else 1)
            else:
                events.append(outcome)
        return EngineBatch(timestamp, dp_rank, events, skipped)

    def _read(self, packed: msgspec.Raw) -> _Event | Reason:
        try:
            return (self._map if _is_map(packed) else self._array).decode(packed)
        except UNREADABLE:
            known = _type_of(packed) in ("BlockStored", "BlockRemoved", "AllBlocksCleared", None)
            return "malformed" if known else "unknown_type"


def _is_map(packed: bytes | memoryview | msgspec.Raw) -> bool:
    """Whether a msgpack value begins as a map: fixmap, map 16 or map 32."""
    first = memoryview(packed)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _read_frame(payload: bytes | memoryview) -> tuple[float, list[msgspec.Raw], int | None]:
    try:
        if _is_map(payload):
            mapped = _map_frame.decode(payload)
            return mapped.ts, mapped.events, mapped.data_parallel_rank
        array = _array_frame.decode(payload)
    except UNREADABLE as error:
        raise MalformedEvent(f"a KV event frame that cannot be read: {error}") from error
    return array.ts, array.events, array.dp_rank


def _judge(event: _Event, numbers: Numbers, judge: Callable[[_Event, Numbers], Outcome]) -> Outcome:
    try:
        return judge(event, numbers)
    except UNREADABLE:
        return "malformed"


def _type_of(packed: msgspec.Raw) -> str | None:
    try:
        return (_map_tag if _is_map(packed) else _array_tag).decode(packed).type
    except UNREADABLE:
        return None


def read_hashes(packed: msgspec.Raw, numbers: Numbers) -> BlockNames:
    """The names of an event's blocks. May raise UNREADABLE."""
    taken = numbers.hashes(packed)
    return block_names(_hashes.decode(packed)) if taken is None else taken


def read_tokens(packed: msgspec.Raw, numbers: Numbers) -> Tokens:
    """An event's token ids. May raise UNREADABLE.

    SGLang with EAGLE sends each with the one behind it (`record_store` in sglang/srt/mem_cache/events.py): there a page
    is found only if the token behind it agrees too. That one is left out, so a prompt that goes on otherwise just where
    a page ends counts as having one page more than the engine finds.
    """
    taken = numbers.tokens(packed)
    if taken is not None:
        return taken
    try:
        return pack_tokens(_tokens.decode(packed))
    except msgspec.ValidationError:
        return pack_tokens([token for token, _ in _bigrams.decode(packed)])


def stored(
    engine_hashes: BlockNames,
    parent: EngineHash | None,
    tokens: Tokens,
    block_size: int,
    tier: Tier,
    namespace: Namespace,
    extras: tuple[bytes, ...] = (),
    once: bool = False,
) -> Outcome:
    """A BlockStored, if there are tokens, and as many as the blocks need."""
    if not len(engine_hashes) or block_size < 1 or len(tokens) != len(engine_hashes) * block_size:
        return "tokens"
    return BlockStored(engine_hashes, parent, tokens, block_size, tier, namespace, extras, once)


def removed(event: Removed, numbers: Numbers, tiers: dict[str | None, Tier]) -> Outcome:
    """A BlockRemoved of a medium that counts."""
    tier = tiers.get(event.medium)
    return "medium" if tier is None else BlockRemoved(read_hashes(event.block_hashes, numbers), tier)


CLEARED = AllBlocksCleared()
