"""What only vLLM's events have: extra keys, attention groups, localities, a frame that may be a map."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    MalformedEvent,
    WindowRemoved,
    WindowStored,
)
from engines.vllm.decode import Decoder, decode
from indexer.types import Namespace, Tier
from tests.engines.plain import plain_batch


def frame(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def store(**changes: Any) -> dict[str, Any]:
    fields = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5, 6, 7, 8], "block_size": 2}
    return {"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None, **fields, **changes}


def remove(**changes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", **changes}


def stored(**changes: Any) -> BlockStored:
    (event,) = decode(frame(store(**changes))).events
    assert isinstance(event, BlockStored)
    return event


def packed(*keys: Any) -> bytes:
    return b"".join(msgspec.msgpack.encode(key) for key in keys)


IMAGE = ["image-1", -3]
BARE = "image-1"
"""How versions before the offsets named an image."""


@pytest.mark.parametrize(
    ("changes", "namespace", "extras"),
    [
        ({"extra_keys": None}, Namespace(), ()),
        ({"extra_keys": []}, Namespace(), ()),
        ({"extra_keys": [None, None]}, Namespace(), ()),
        ({"extra_keys": [["tenant-a"], None]}, Namespace(None, "tenant-a"), ()),
        ({"extra_keys": [["x" * 300], None]}, Namespace(None, "x" * 300), ()),
        ({"extra_keys": [["ad"], ["ad"]], "lora_name": "ad"}, Namespace("ad"), ()),
        ({"extra_keys": [["ad", "tenant-a"], ["ad"]], "lora_name": "ad"}, Namespace("ad", "tenant-a"), ()),
        ({"extra_keys": [["ad", "ad"], ["ad"]], "lora_name": "ad"}, Namespace("ad", "ad"), ()),
        ({"extra_keys": None, "lora_name": "ad", "lora_id": 1}, Namespace("ad"), ()),
        ({"extra_keys": [None, [IMAGE]]}, Namespace(), (b"", packed(IMAGE))),
        ({"extra_keys": [[IMAGE, "tenant-a"], [IMAGE]]}, Namespace(None, "tenant-a"), (packed(IMAGE), packed(IMAGE))),
        ({"extra_keys": [["ad", IMAGE, "s", b"\x01"], ["ad"]], "lora_name": "ad"}, Namespace("ad", "s"),
         (packed(IMAGE, b"\x01"), b"")),
        ({"extra_keys": [[BARE, "tenant-a"], None]}, Namespace(None, "tenant-a"), (packed(BARE), b"")),
        ({"extra_keys": [[BARE], None], "parent_block_hash": 9}, Namespace(), (packed(BARE), b"")),
        ({"extra_keys": [None, [BARE]]}, Namespace(), (b"", packed(BARE))),
    ],
)  # fmt: skip
def test_extra_keys(changes: dict[str, Any], namespace: Namespace, extras: tuple[bytes, ...]) -> None:
    event = stored(**changes)
    assert (event.namespace, event.extras) == (namespace, extras)


def test_two_images_at_one_place_and_one_image_at_two_differ() -> None:
    keys = [["image-1", 0], ["image-2", 0], ["image-1", 1]]
    assert len({stored(extra_keys=[[key], None]).extras for key in keys}) == 3


@pytest.mark.parametrize("extra_keys", [[["s"]], [None, None, ["s"]], "s", [7, None]])
def test_extra_keys_that_fit_no_blocks_are_malformed(extra_keys: Any) -> None:
    assert decode(frame(store(extra_keys=extra_keys))).skipped == {"malformed": 1}


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_groups_that_make_a_prefix(kind: str | None) -> None:
    assert stored(kv_cache_spec_kind=kind, group_idx=1).tier is Tier.GPU


def test_the_only_group_of_a_model_makes_a_prefix_though_its_layers_are_of_several_kinds() -> None:
    # 0.22 to 0.26 know no kind for MLA with a drafter of full attention (UniformTypeKVCacheSpecs).
    decoder = Decoder()
    mixed = {"kv_cache_spec_kind": "unknown", "group_idx": 0}
    (event,) = decoder(frame(store(**mixed))).events
    assert isinstance(event, BlockStored)
    assert plain_batch(decoder(frame(remove(group_idx=0)))).events == [BlockRemoved([1], Tier.GPU)]
    assert decoder(frame(store(**mixed, kv_cache_spec_sliding_window=8))).skipped == {"group": 1}
    assert decoder(frame(store(**mixed | {"group_idx": 1}))).skipped == {"group": 1}


@pytest.mark.parametrize(
    "kind", ["sliding_window", "mamba", "chunked_local_attention", "cross_attention", "unknown", ""]
)
def test_groups_that_make_none(kind: str) -> None:
    assert decode(frame(store(kv_cache_spec_kind=kind))).skipped == {"group": 1}


@pytest.mark.parametrize(
    ("kind", "tokens", "window"),
    [
        ("sliding_window", 2, 1),  # the token itself and one before
        ("sliding_window", 3, 1),
        ("sliding_window", 4, 2),
        ("sliding_window_mla", 128, 64),
        ("mamba", None, 1),
    ],
)
def test_groups_with_a_window(kind: str, tokens: int | None, window: int) -> None:
    decoder = Decoder()
    given = store(kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=tokens, group_idx=3)
    assert plain_batch(decoder(frame(given))).events == [WindowStored([1, 2], 2, 3, window)]
    assert plain_batch(decoder(frame(remove(group_idx=3)))).events == [WindowRemoved([1], 3)]
    lower = decoder(frame({**given, "medium": "CPU"}, remove(group_idx=3, medium="STORAGE")))
    assert plain_batch(lower).events == [WindowStored([1, 2], 2, 3, window, Tier.CPU), WindowRemoved([1], 3, Tier.DISK)]
    elsewhere = [{**given, "medium": "TAPE"}, remove(group_idx=3, medium="TAPE")]
    assert decoder(frame(*elsewhere)).skipped == {"group": 2}


@pytest.mark.parametrize("tokens", [None, 1, 0, -5, 1 << 31])
def test_a_window_that_asks_for_nothing_before_or_is_none(tokens: int | None) -> None:
    given = store(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=tokens, group_idx=3)
    assert decode(frame(given)).skipped == {"group": 1}


def test_a_removal_follows_what_was_learnt_of_its_group() -> None:
    decoder = Decoder()
    decoder(frame(store(group_idx=0, kv_cache_spec_kind="full_attention")))
    decoder(frame(store(group_idx=1, kv_cache_spec_kind="sliding_window")))
    assert decoder(frame(remove(group_idx=1))).skipped == {"group": 1}
    assert plain_batch(decoder(frame(remove(group_idx=0)))).events == [BlockRemoved([1], Tier.GPU)]
    assert plain_batch(decoder(frame(remove()))).events == [BlockRemoved([1], Tier.GPU)]
    # A restarted engine may number its groups otherwise.
    decoder(frame(store(group_idx=1, kv_cache_spec_kind="full_attention")))
    assert plain_batch(decoder(frame(remove(group_idx=1)))).events == [BlockRemoved([1], Tier.GPU)]


@pytest.mark.parametrize("medium", ["STORAGE", "FS", "OBJ"])  # the latter two up to 0.26 at least
def test_a_tier_below_memory_is_disk_by_any_name(medium: str) -> None:
    assert stored(medium=medium).tier is Tier.DISK
    assert plain_batch(decode(frame(remove(medium=medium)))).events == [BlockRemoved([1], Tier.DISK)]


def offloaded(**changes: Any) -> dict[str, Any]:
    """What KV offloading says of a block that it copied to CPU memory: `_placeholder_stored` in 0.26 to 0.33."""
    nothing = {"token_ids": [], "block_size": 0, "parent_block_hash": None, "group_idx": 0}
    return store(block_hashes=[1], medium="CPU", **nothing, **changes)


def test_what_is_offloaded_is_named_by_its_hash_alone() -> None:
    assert plain_batch(decode(frame(offloaded()))).events == [BlockCopied([1], Tier.CPU)]
    assert plain_batch(decode(frame(offloaded() | {"medium": "FS"}))).events == [BlockCopied([1], Tier.DISK)]
    # Or with the size and kind that are known all the same: SimpleCPUOffloadConnector.
    known = {"block_size": 2, "kv_cache_spec_kind": "full_attention"}
    assert plain_batch(decode(frame(offloaded() | known))).events == [BlockCopied([1], Tier.CPU)]
    # That a block is in the GPU's memory comes with its tokens, or says nothing.
    assert decode(frame(offloaded() | {"medium": "GPU"})).skipped == {"tokens": 1}


def test_what_is_offloaded_of_layers_with_a_window_is_theirs_and_of_others_that_make_no_prefix_none() -> None:
    decoder = Decoder()
    decoder(frame(store(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8)))
    decoder(frame(store(group_idx=2, kv_cache_spec_kind="cross_attention")))
    window = plain_batch(decoder(frame(offloaded() | {"group_idx": 1}))).events
    assert window == [WindowStored([1], 2, 1, 4, Tier.CPU)]
    assert decoder(frame(offloaded() | {"group_idx": 2})).skipped == {"group": 1}
    assert plain_batch(decoder(frame(offloaded()))).events == [BlockCopied([1], Tier.CPU)]


def test_offloading_that_describes_itself_says_all() -> None:
    assert stored(medium="CPU", group_idx=0, kv_cache_spec_kind="full_attention").tier is Tier.CPU


def test_chunks_that_lmcache_keeps_do_not_count() -> None:
    """It tells of none that goes. It calls the medium CPU, as vLLM's own offloading does, since September 2026."""
    assert decode(frame(store(medium="CPU"))).skipped == {"medium": 1}
    assert stored(medium="CPU", locality="LOCAL").tier is Tier.CPU  # SimpleCPUOffloadConnector


@pytest.mark.parametrize("event", [store(medium="STORAGE"), remove(medium="STORAGE")])
def test_what_another_machine_holds_is_not_the_workers(event: dict[str, Any]) -> None:
    assert decode(frame({**event, "locality": "REMOTE"})).skipped == {"medium": 1}
    assert decode(frame({**event, "locality": "LOCAL"})).skipped == {}


def test_a_frame_may_be_a_map() -> None:
    mapped = {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 2}
    assert decode(msgspec.msgpack.encode(mapped)) == EngineBatch(1.0, 2, [AllBlocksCleared()], {})
    with pytest.raises(MalformedEvent):
        decode(msgspec.msgpack.encode({"ts": 1.0}))


def test_where_only_the_gpus_blocks_are_cleared_all_are_forgotten() -> None:
    cleared = {"type": "TierBlocksCleared"}
    for medium in ("GPU", None):
        assert decode(frame({**cleared, "medium": medium})) == decode(frame({"type": "AllBlocksCleared"}))
    for medium in ("CPU", "NEW"):
        assert decode(frame({**cleared, "medium": medium})).skipped == {"medium": 1}


def test_an_array_of_an_old_version_may_end_early() -> None:
    old = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None]
    batch = decode(msgspec.msgpack.encode([1.0, [old, ["BlockRemoved", [1]]]]))
    assert plain_batch(batch).events == [
        BlockStored([1, 2], None, [5, 6, 7, 8], 2, Tier.GPU),
        BlockRemoved([1], Tier.GPU),
    ]


@pytest.mark.parametrize("header", [b"\x81", b"\xde\x00\x01", b"\xdf\x00\x00\x00\x01"])
def test_every_size_of_map_is_one(header: bytes) -> None:
    cleared = header + packed("type", "AllBlocksCleared")
    assert decode(b"\x92" + packed(1.0) + b"\x91" + cleared).events == [AllBlocksCleared()]
