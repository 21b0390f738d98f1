"""What every engine's event codec promises, whatever the encoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engines.sglang.decode
import engines.vllm.decode
from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBatch, MalformedEvent
from indexer.handles import BlockHandles, UnknownParent, block_name
from indexer.hashing import root_hash
from indexer.types import Namespace, Tier
from tests.engines.plain import plain, plain_batch
from tests.engines.recordings import RECORDINGS, payloads

Decode = Callable[[bytes], EngineBatch]
FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
]


class Codec(NamedTuple):
    name: str
    decode: Decode
    stored: Callable[..., Any]
    removed: Callable[..., Any]
    cleared: Any
    cpu: str
    moved: dict[str, Any]
    """What tells a store to its CPU memory from one of LMCache's; in an array, that there are no tokens."""
    disk: str
    salt: Callable[[str], dict[str, Any]]
    lora: bool


def as_map(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "lora_id": None, "medium": "GPU", **fields}


def vllm_array(**fields: Any) -> list[Any]:
    return ["BlockStored", *(as_map(**fields).get(field) for field in FIELDS)]


def sglang_array(metadata: dict[str, str] | None = None, **fields: Any) -> list[Any]:
    return ["BlockStored", *(as_map(**fields)[field] for field in FIELDS[:6]), *([metadata] if metadata else [])]


def removed_map(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "medium": "GPU", **fields}


def removed_array(**fields: Any) -> list[Any]:
    return ["BlockRemoved", *({"medium": "GPU", **fields}[field] for field in ("block_hashes", "medium"))]


def vllm_salt(salt: str) -> dict[str, Any]:
    return {"extra_keys": [[salt], None]}


def sglang_salt(salt: str) -> dict[str, Any]:
    return {"cache_salt": salt}


VLLM, SGLANG = engines.vllm.decode.decode, engines.sglang.decode.decode
CLEARED_MAP, CLEARED_ARRAY = {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]
CODECS = [
    Codec("vllm", VLLM, as_map, removed_map, CLEARED_MAP, "CPU", {"group_idx": 0}, "STORAGE", vllm_salt, lora=True),
    Codec(
        "vllm-arrays",
        VLLM,
        vllm_array,
        removed_array,
        CLEARED_ARRAY,
        "CPU",
        {"token_ids": []},
        "STORAGE",
        vllm_salt,
        lora=True,
    ),
    Codec("sglang", SGLANG, as_map, removed_map, CLEARED_MAP, "CPU_PINNED", {}, "DISK", sglang_salt, lora=True),
    Codec(
        "sglang-arrays",
        SGLANG,
        sglang_array,
        removed_array,
        CLEARED_ARRAY,
        "CPU_PINNED",
        {},
        "DISK",
        lambda salt: {"metadata": sglang_salt(salt)},
        lora=False,
    ),
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
decoders = pytest.mark.parametrize("decode", [VLLM, SGLANG], ids=["vllm", "sglang"])


def frame(*events: Any, timestamp: Any = 1.5, dp_rank: Any = 3) -> bytes:
    return msgspec.msgpack.encode([timestamp, events, dp_rank])


def two_blocks(codec: Codec, **changes: Any) -> Any:
    fields = {"block_hashes": [11, 12], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}
    return codec.stored(**{**fields, **changes})


def only(codec: Codec, event: Any) -> Any:
    batch = codec.decode(frame(event))
    assert batch.skipped == {}
    (found,) = batch.events
    return plain(found)


def reason(codec: Codec, event: Any) -> str:
    """Why the event was skipped; the events around it survive."""
    batch = codec.decode(frame(codec.cleared, event, codec.removed(block_hashes=[5])))
    assert plain_batch(batch).events == [AllBlocksCleared(), BlockRemoved([5], Tier.GPU)]
    ((found, count),) = batch.skipped.items()
    assert count == 1
    return found


@codecs
def test_a_store(codec: Codec) -> None:
    assert only(codec, two_blocks(codec)) == BlockStored([11, 12], None, [1, 2, 3, 4], 2, Tier.GPU)


@codecs
def test_a_batch_keeps_its_order_its_time_and_its_rank(codec: Codec) -> None:
    batch = codec.decode(frame(codec.removed(block_hashes=[1]), codec.cleared, two_blocks(codec)))
    assert [type(event) for event in batch.events] == [BlockRemoved, AllBlocksCleared, BlockStored]
    assert (batch.timestamp, batch.dp_rank, batch.skipped) == (1.5, 3, {})


@codecs
def test_a_batch_without_a_rank_says_so(codec: Codec) -> None:
    assert codec.decode(frame(codec.cleared, dp_rank=None)).dp_rank is None
    assert codec.decode(msgspec.msgpack.encode([1, [codec.cleared]])) == EngineBatch(
        1.0, None, [AllBlocksCleared()], {}
    )


@codecs
@pytest.mark.parametrize("engine_hash", [-(2**63), -1, 0, 2**64 - 1, b"\x00" * 32, b""])
def test_hashes_become_names_and_a_parent_stays_as_it_came(codec: Codec, engine_hash: int | bytes) -> None:
    changes = {"block_hashes": [engine_hash, 12], "parent_block_hash": engine_hash}
    stored = only(codec, two_blocks(codec, **changes))
    assert (stored.engine_hashes, stored.parent) == ([block_name(engine_hash), 12], engine_hash)
    assert only(codec, codec.removed(block_hashes=[engine_hash])).engine_hashes == [block_name(engine_hash)]


@codecs
def test_tiers(codec: Codec) -> None:
    for medium, tier in [("GPU", Tier.GPU), (codec.cpu, Tier.CPU), (codec.disk, Tier.DISK), (None, Tier.GPU)]:
        moved = codec.moved if tier is Tier.CPU else {}
        assert only(codec, two_blocks(codec, medium=medium, **moved)).tier is tier
        assert only(codec, codec.removed(block_hashes=[1], medium=medium)).tier is tier


@codecs
@pytest.mark.parametrize("medium", ["cpu", "EXTERNAL", "gpu", "", "TAPE"])
def test_an_unknown_tier_is_worth_nothing(codec: Codec, medium: str) -> None:
    assert reason(codec, two_blocks(codec, medium=medium)) == "medium"
    assert reason(codec, codec.removed(block_hashes=[1], medium=medium)) == "medium"


@codecs
def test_a_salt_makes_a_namespace(codec: Codec) -> None:
    stored = only(codec, two_blocks(codec, **codec.salt("tenant-a")))
    assert stored.namespace == Namespace(cache_salt="tenant-a")
    assert stored.extras == ()


@codecs
def test_a_lora_name_makes_a_namespace_and_a_mere_number_makes_none(codec: Codec) -> None:
    assert reason(codec, two_blocks(codec, lora_id=7)) == "lora"
    if codec.lora:
        assert only(codec, two_blocks(codec, lora_id=7, lora_name="ad")).namespace == Namespace("ad")
        salted = two_blocks(codec, lora_name="ad", **codec.salt("tenant-a"))
        assert only(codec, salted).namespace == Namespace("ad", "tenant-a")


@codecs
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, 2, 3, 4, 5]},
        {"token_ids": []},
        {"token_ids": [], "block_size": 0},
        {"token_ids": [], "block_hashes": []},
        {"block_size": -2},
        {"block_size": 2**63},
    ],
)
def test_blocks_without_their_tokens_are_skipped(codec: Codec, changes: dict[str, Any]) -> None:
    assert reason(codec, two_blocks(codec, **changes)) == "tokens"


@codecs
def test_of_a_token_with_the_one_behind_it_the_first_counts(codec: Codec) -> None:
    pairs = two_blocks(codec, token_ids=[(1, 2), (2, 3), (3, 4), (4, 5)])
    assert only(codec, pairs) == BlockStored([11, 12], None, [1, 2, 3, 4], 2, Tier.GPU)


@codecs
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": [1, 2, 3, 2**32]},
        {"token_ids": [1, 2, 3, True]},
        {"token_ids": [1, 2, 3, 4.5]},
        {"token_ids": [1, 2, [3, 4], 5]},
        {"token_ids": [[1, 2], [2, 3], [3, 4], [4]]},
        {"token_ids": [[1, 2], [2, 3], [3, 4], [4, -1]]},
        {"token_ids": "1234"},
        {"token_ids": None},
        {"token_ids": [[[1, 2]]]},
        {"block_hashes": [11, None]},
        {"block_hashes": [11, True]},
        {"block_hashes": 11},
        {"parent_block_hash": "root"},
        {"parent_block_hash": 1.0},
        {"block_size": "2"},
        {"block_size": True},
        {"medium": 1},
    ],
)
def test_a_malformed_event_is_counted_and_the_others_survive(codec: Codec, changes: dict[str, Any]) -> None:
    assert reason(codec, two_blocks(codec, **changes)) == "malformed"


@codecs
@pytest.mark.parametrize("event", [None, 7, "BlockStored", [], {}, [7], {"type": 7}, ["BlockStored"], [[], []]])
def test_what_is_no_event_is_counted_and_the_others_survive(codec: Codec, event: Any) -> None:
    assert reason(codec, event) == "malformed"


@codecs
def test_an_event_of_a_later_version_is_counted_apart(codec: Codec) -> None:
    assert reason(codec, {"type": "BlockPinned", "block_hashes": [1]}) == "unknown_type"
    assert reason(codec, ["BlockPinned", [1]]) == "unknown_type"


@codecs
def test_fields_of_a_later_version_are_ignored(codec: Codec) -> None:
    event = two_blocks(codec)
    later = {**event, "new": {"a": [1]}} if isinstance(event, dict) else [*event, *[None] * 12, {"a": [1]}]
    assert only(codec, later) == only(codec, event)


@decoders
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgspec.msgpack.encode("kv"),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, None, 0]),
        msgspec.msgpack.encode([1.0, {}, 0]),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([None, [], 0]),
        frame(timestamp=math.nan),
        frame(timestamp=math.inf),
        frame(dp_rank=-1),
        frame(dp_rank="0"),
        frame(dp_rank=True),
        frame() + b"\x00",
        b"\x92\x01\xdd\xff\xff\xff\xff",  # four thousand million events, says the header
        b"\x92\x01\x91" + b"\x91" * 200_000 + b"\x01",  # nested deeper than the stack
        b"\x92\x01\x91\xc6\xff\xff\xff\xff",
    ],
)
def test_a_malformed_frame_is_an_error(decode: Decode, payload: bytes) -> None:
    with pytest.raises(MalformedEvent):
        decode(payload)


def check(decode: Decode, payload: bytes) -> None:
    """Either MalformedEvent, or events that the index can take as they are."""
    try:
        batch = decode(payload)
    except MalformedEvent:
        return
    assert math.isfinite(batch.timestamp)
    handles = BlockHandles()
    for event in batch.events:
        if isinstance(event, BlockStored):
            try:
                root = root_hash(event.namespace)
                handles.store(
                    event.tier, event.engine_hashes, event.parent, event.token_ids, event.block_size, root, event.extras
                )
            except UnknownParent:
                pass
        elif isinstance(event, BlockRemoved):
            handles.remove(event.tier, event.engine_hashes)


@decoders
@given(payload=st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(decode: Decode, payload: bytes) -> None:
    check(decode, payload)


msgpack_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
msgpack_values = st.recursive(
    msgpack_scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
few_hashes = st.lists(st.integers(0, 3) | st.binary(max_size=2), max_size=3)
field_values: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": few_hashes | msgpack_values,
    "parent_block_hash": st.none() | st.integers(0, 3) | msgpack_values,
    "token_ids": st.lists(st.integers(0, 2**32), max_size=4) | msgpack_values,
    "block_size": st.integers(-1, 3) | msgpack_values,
    "lora_id": st.none() | msgpack_values,
    "medium": st.sampled_from(["GPU", "CPU", "cpu", None]) | msgpack_values,
    "lora_name": st.none() | st.just("ad") | msgpack_values,
    "extra_keys": st.none()
    | st.lists(st.none() | st.lists(st.just("ad") | msgpack_values, max_size=3))
    | msgpack_values,
    "group_idx": st.integers(0, 1) | msgpack_values,
    "kv_cache_spec_kind": st.sampled_from(["full_attention", "mamba"]) | msgpack_values,
}
types = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
map_events = st.builds(
    lambda kind, fields: {"type": kind, **fields}, types, st.fixed_dictionaries({}, optional=field_values)
)
array_events = st.builds(lambda kind, fields: [kind, *fields], types, st.tuples(*field_values.values()))


@decoders
@given(events=st.lists(map_events | array_events | msgpack_values, max_size=4))
def test_hostile_events_raise_nothing_and_none_goes_uncounted(decode: Decode, events: list[Any]) -> None:
    payload = frame(*events)
    check(decode, payload)
    batch = decode(payload)
    removed = sum(isinstance(event, BlockRemoved) for event in batch.events)
    joined = sum(len(event.engine_hashes) - 1 for event in batch.events if isinstance(event, BlockRemoved))
    found = len(batch.events) + sum(batch.skipped.values())
    assert found == len(events) or (removed and found <= len(events) <= found + joined)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
@given(data=st.data())
def test_cut_and_changed_recordings_raise_nothing_else(recording: Any, data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(payloads(recording.name)[:40]), label="payload"))
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255)), max_size=4)
    ):
        payload[place] = byte
    check(recording.decode, bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    check(recording.decode, bytes(payload))
