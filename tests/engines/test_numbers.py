"""Frames with their numbers taken out mean what they meant: against msgpack read in full, and nothing hostile harms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engines.kv_events
import engines.sglang.decode
import engines.vllm.decode
from engines.events import BlockRemoved, EngineBatch, EngineEvent, MalformedEvent
from engines.numbers import NONE, Digest, take_out
from tests.engines.plain import plain
from tests.engines.recordings import RECORDINGS, payloads

Json = dict[str, Any]
BIG = 1 << 32


def frame(*events: Any, **rest: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, rest.get("dp_rank", 0)])


def removed(*hashes: int, **more: Any) -> Json:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def meaning(digest: Digest) -> Any:
    """A digested frame in full, numbers modulo 2^64."""
    taken: dict[int, Any] = {4: digest.numbers.narrow, 8: digest.numbers.wide}

    def put_back(code: int, data: memoryview) -> list[int]:
        begin, count = np.frombuffer(data, ">u4").tolist()
        found: list[int] = taken[code][begin : begin + count].tolist()
        return found

    return msgspec.msgpack.decode(digest.frame, ext_hook=put_back)


def apart(batch: Any, stands_for: list[int]) -> list[Any]:
    """The events of a digested frame, joined removals by themselves again."""
    found = []
    for event, count in zip(batch[1], stands_for, strict=True):
        if count == 1:
            found.append(event)
        else:
            for name in event["block_hashes"] if isinstance(event, dict) else event[1]:
                one = dict(event, block_hashes=[name]) if isinstance(event, dict) else [event[0], [name], *event[2:]]
                found.append(one)
    return found


def modulo(value: Any) -> Any:
    """Numbers as 64 bits."""
    if isinstance(value, dict):
        return {modulo(key): modulo(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [modulo(inner) for inner in value]
    return value & (1 << 64) - 1 if isinstance(value, int) and not isinstance(value, bool) else value


numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 127, 128, 255, 256, 65535, 65536, BIG - 1, BIG, -1, -32, -33, -128, -129, -32769, -BIG]),
)
arrays = st.one_of(
    st.lists(st.integers(0, BIG - 1), max_size=30),
    st.lists(numbers, max_size=30),
    st.lists(numbers | st.none() | st.booleans() | st.just(4.0) | st.lists(numbers, max_size=2), max_size=12),
)
small = st.none() | st.text(max_size=40) | st.binary(max_size=40) | numbers | st.floats(allow_nan=False)
removals = st.one_of(
    st.builds(removed, numbers),
    st.builds(removed, st.integers(BIG, 2 * BIG), medium=st.sampled_from(["GPU", "CPU"])),
    st.builds(lambda h: ["BlockRemoved", [h], "GPU"], numbers),
    st.builds(lambda h, other: removed(h, other=other), st.integers(BIG, 2 * BIG), arrays),
    st.builds(lambda h, other: {"type": "BlockRemoved", "other": [h], "block_hashes": other}, numbers, arrays),
)
stores = st.one_of(
    st.fixed_dictionaries({"type": st.just("BlockStored"), "block_hashes": arrays, "token_ids": arrays, "x": small}),
    st.tuples(st.just("BlockStored"), arrays, small, arrays).map(list),
)
all_events = st.lists(removals | stores | small | arrays, max_size=12)


@given(all_events, small)
def test_a_frame_means_what_it_meant(events: list[Any], dp_rank: Any) -> None:
    payload = frame(*events, dp_rank=dp_rank)
    digest = take_out(payload)
    assert len(digest.frame) <= len(payload) + 4
    if digest.events is None:
        assert digest.frame == payload
        return
    found = meaning(digest)
    found[1] = apart(found, digest.events)
    assert modulo(found) == modulo(msgspec.msgpack.decode(payload))


def outcome(decode: Callable[[bytes], EngineBatch], payload: bytes) -> Any:
    """Everything that a decoder says, joined removals apart."""
    try:
        batch = decode(payload)
    except MalformedEvent:
        return "malformed"
    events: list[EngineEvent] = []
    for event in map(plain, batch.events):
        if isinstance(event, BlockRemoved) and event.engine_hashes:
            events += [BlockRemoved([name], event.tier) for name in event.engine_hashes]
        elif not isinstance(event, BlockRemoved):
            events.append(event)
    return batch.timestamp, batch.dp_rank, events, batch.skipped


def decoders() -> list[Callable[[bytes], EngineBatch]]:
    return [engines.vllm.decode.Decoder(), engines.sglang.decode.decode]


def both_ways(payload: bytes) -> tuple[list[Any], list[Any]]:
    """With the numbers taken out, and all of it read by msgspec."""
    short = [outcome(decode, payload) for decode in decoders()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines.kv_events, "take_out", lambda whole: Digest(whole, NONE, None))
        return short, [outcome(decode, payload) for decode in decoders()]


vllm_stores = st.builds(
    lambda blocks, tokens, **more: {
        "type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None, "token_ids": tokens, **more
    },
    arrays, arrays, block_size=st.sampled_from([1, 2, 0, -1, "1"]), medium=st.sampled_from(["GPU", "cpu", None, 3]),
)  # fmt: skip
whole_stores = st.lists(numbers, min_size=1, max_size=8).flatmap(
    lambda blocks: st.builds(
        lambda tokens: {
            "type": "BlockStored", "block_hashes": blocks, "parent_block_hash": blocks[0], "token_ids": tokens,
            "block_size": 3,
        },
        st.lists(st.integers(0, BIG), min_size=3 * len(blocks), max_size=3 * len(blocks)),
    )
)  # fmt: skip


@given(st.lists(removals | vllm_stores | whole_stores | stores | small, max_size=8))
def test_decoders_say_the_same_as_without(events: list[Any]) -> None:
    short, long = both_ways(frame(*events))
    assert short == long


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
def test_recordings_say_the_same_as_without(recording: Any) -> None:
    for payload in payloads(recording.name):
        short, long = both_ways(payload)
        assert short == long


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
@given(data=st.data())
def test_changed_recordings_say_the_same_as_without(recording: Any, data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(payloads(recording.name)[:40]), label="payload"))
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255)), max_size=3)
    ):
        payload[place] = byte
    short, long = both_ways(bytes(payload[: data.draw(st.sampled_from([None, 20, 50, 100, 200]))]))
    assert short == long


@given(st.binary(max_size=60), st.binary(max_size=30))
def test_random_bytes_harm_nothing(events: bytes, more: bytes) -> None:
    for payload in (events, b"\x93\x01\x92" + events + more, b"\x93\x01\xdd\xff\xff\xff\xff" + events):
        short, long = both_ways(payload)
        assert short == long


def test_a_prompt_and_what_it_displaces_become_two_short_events() -> None:
    hashes = [(1 << 40) * number for number in range(1, 601)]
    store = {"type": "BlockStored", "block_hashes": hashes, "token_ids": list(range(9600)), "block_size": 16}
    digest = take_out(frame(*(removed(name, group_idx=0) for name in hashes), store))
    assert digest.events == [600, 1]
    assert len(digest.frame) < 200


@pytest.mark.parametrize(
    "events",
    [
        [removed(BIG), removed(BIG + 1, medium="CPU")],
        [removed(BIG), removed(BIG + 1, more=1)],
        [removed(BIG, BIG + 1), removed(BIG + 2, BIG + 3)],
        [removed(BIG, other=[BIG]), removed(BIG, other=[BIG + 1])],
        [["BlockStored", [BIG], None], ["BlockStored", [BIG + 1], None]],
        [removed(BIG), {"type": "AllBlocksCleared"}, removed(BIG)],
    ],
)
def test_only_removals_that_differ_in_their_hash_are_joined(events: list[Any]) -> None:
    assert take_out(frame(*events)).events == [1] * len(events)


def test_signed_and_unsigned_hashes_are_joined() -> None:
    digest = take_out(frame(removed(-BIG * 5), removed(BIG * 5), removed(-BIG * 7)))
    assert digest.events == [3]
    assert digest.numbers.wide[:3].tolist() == [2**64 - BIG * 5, BIG * 5, 2**64 - BIG * 7]


@pytest.mark.parametrize("extension", [b"\xd7\x04" + bytes(8), b"\xd7\x08" + bytes(7) + b"\x01", b"\xc7\x01\x04\x00"])
def test_an_engines_own_extension_stands_for_nothing(extension: bytes) -> None:
    event = b"\x82\xa4type\xacBlockRemoved\xacblock_hashes" + extension
    payload = b"\x92\x01\x92" + msgspec.msgpack.encode(removed(*range(BIG, BIG + 9))) + event
    assert take_out(payload).events is None
    assert engines.vllm.decode.decode(payload).skipped == {"malformed": 1}
