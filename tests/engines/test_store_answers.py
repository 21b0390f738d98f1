"""What a Mooncake master answers, how large a token's KV is, and whether a store's keys look as expected."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.store import (
    Segment,
    SglangLayout,
    Stored,
    VllmGroup,
    VllmLayout,
    bytes_per_token,
    query_path,
    read_present,
    read_query,
    read_segments,
    verify,
)
from engines.store.query import lease_path
from indexer.types import Tier
from tests.engines.recordings import exchanges

BLOCK = 16
DIGEST = "ab" * 32
ABSENT = {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None, "disk_values": None, "local_disk_values": None}
REPLICA = {"size_": 100, "buffer_address_": 140079737602048, "protocol_": "tcp", "transport_endpoint_": "10.0.0.1:1"}
HELD = {"ok": True, "error": None, "values": [REPLICA], "disk_values": None, "local_disk_values": None}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def answering(data: object) -> bytes:
    return json.dumps({"success": True, "data": data}).encode()


def test_recorded_answer() -> None:
    [asked] = [
        each for each in exchanges("vllm-0.32.0-mooncake") if each["step"].startswith("master /batch_query_keys")
    ]
    found = read_query(json.dumps(asked["response"]["body"]).encode())
    assert set(found) == set(asked["request"]["path"].partition("=")[2].split(",")) - {"absent"}
    assert len(found) == 2
    assert set(found.values()) == {Stored(32768, Tier.CPU, ("127.0.0.1:15479",))}


def test_owners_are_told_once() -> None:
    other = REPLICA | {"transport_endpoint_": "10.0.0.2:1"}
    held = HELD | {"values": [REPLICA, other, REPLICA]}
    assert read_query(answering({"a": held, "b": ABSENT})) == {"a": Stored(100, Tier.CPU, ("10.0.0.1:1", "10.0.0.2:1"))}


@pytest.mark.parametrize("where", ["disk_values", "local_disk_values", "nof_values"])
def test_on_disk(where: str) -> None:
    held = HELD | {"values": None, where: [{"object_size": 7, "file_path": "/x"}]}
    assert read_query(answering({"a": held})) == {"a": Stored(7, Tier.DISK)}


def test_without_a_replica_it_is_not_there() -> None:
    assert read_query(answering({"a": HELD | {"values": []}})) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"success":false,"error":"No keys provided. Use ?keys=key1,key2,..."}',
        b'{"success":true}',
        b'{"success":true,"data":{"a":{}}}',
        b'{"success":true,"data":{"a":{"ok":true,"values":[{"size_":-1}]}}}',
        b'{"success":true,"data":{"a":{"ok":true,"values":[{"size_":1e400}]}}}',
        b'{"success":true,"data":' + b'{"a":' * 100_000,
    ],
)
def test_no_answer_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_query(body)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_is_an_answer_or_a_value_error(body: bytes) -> None:
    for read in (read_query, read_segments):
        with contextlib.suppress(ValueError):
            read(body)


@given(json_values, json_values)
def test_any_object_is_read_or_a_value_error(values: Any, on_disk: Any) -> None:
    with contextlib.suppress(ValueError):
        read_query(answering({"a": {"ok": True, "values": values, "disk_values": on_disk}}))


def test_segments() -> None:
    body = (
        b'{"total_segments":1,"segments":[{"segment_name":"127.0.0.1:13352","segment_id":"1-2","client_id":"3-4",'
        b'"base_address":"0x7f66db000000","size_bytes":67108864,"size_human":"0.0625 GiB",'
        b'"te_endpoint":"127.0.0.1:16468","protocol":"tcp","status":"OK","allocator_used_bytes":400,'
        b'"allocator_capacity_bytes":67108864,"allocator_usage_percent":5.960464477539062E-4}]}'
    )
    assert read_segments(body) == [Segment("127.0.0.1:13352", "127.0.0.1:16468", 67108864, 400)]


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        (["tiny@tp_rank:0@pcp0", "x_0_k"], "/batch_query_keys?keys=tiny@tp_rank:0@pcp0,x_0_k"),
        (["a&b", "wé rd+1%"], "/batch_query_keys?keys=a%26b,w%C3%A9%20rd%2B1%25"),
        (["line\n"], "/batch_query_keys?keys=line%0A"),
        (["\ud800"], "/batch_query_keys?keys=%ED%A0%80"),
        (["a,b"], None),
        ([], None),
    ],
)
def test_query(keys: list[str], path: str | None) -> None:
    assert query_path(keys) == path


def test_of_a_key_that_is_leased_only_what_may_not_stand_in_a_url_is_escaped() -> None:
    assert lease_path("epoch=3+(a)!@x") == "/query_key?key=epoch=3+(a)!@x"
    assert lease_path("a b&c#d%é") == "/query_key?key=a%20b%26c%23d%25%C3%A9"


def vllm_key(model: str = "tiny", tp: int = 0, group: int = 0, digest: str = DIGEST, dcp: int = 0) -> str:
    return f"{model}@tp_rank:{tp}@pcp0@dcp{dcp}@pp_rank:0@group:{group}@{digest}"


TINY = VllmLayout(model="/models/tiny", block_size=BLOCK)
TWO = VllmLayout(model="tiny", block_size=BLOCK, tp=2)
SHARED = "@store_tp:4@store_pp:1@store_format:tp_shared_lbhnc"
SGLANG = SglangLayout(model="org/tiny", block_size=16, tp=2, tag="t")


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (TINY, [vllm_key(), vllm_key("other", tp=7)]),
        (TWO, [vllm_key(tp=0), vllm_key(tp=1), "something else"]),
        (VllmLayout(model="tiny", block_size=BLOCK, tp=4, groups=(VllmGroup(0, "latent"),)), [vllm_key()]),
        (VllmLayout(model="tiny", block_size=BLOCK, prefix="a@b"), ["a@b@" + vllm_key()]),
        (VllmLayout(model="tiny", block_size=BLOCK, namespace=SHARED), [vllm_key("tiny" + SHARED)]),
        (VllmLayout(model="tiny", block_size=BLOCK, namespace=SHARED, prefix="p"), ["p@" + vllm_key("tiny" + SHARED)]),
        (SGLANG, [f"t_org-tiny_{DIGEST}_{rank}_{part}" for rank in (0, 1) for part in "kv"]),
        (SglangLayout(model="tiny", block_size=16, names_model=False), [f"{DIGEST}_0_k", f"{DIGEST}_0_v"]),
        (SglangLayout(model="tiny", block_size=16, names_model=False, tag="t", mla=True), [f"t_{DIGEST}__k"]),
        (SglangLayout(model="tiny", block_size=16, mla=True), [f"tiny_{DIGEST}__k"]),
        (SglangLayout(model="tiny", block_size=16, mla=True, pp=2), [f"tiny_{DIGEST}_0_k", f"tiny_{DIGEST}_1_k"]),
    ],
)  # fmt: skip
def test_keys_as_expected(layout: VllmLayout | SglangLayout, keys: list[str]) -> None:
    assert verify(keys, layout).agrees is True, verify(keys, layout).why


@pytest.mark.parametrize(
    ("layout", "keys", "why"),
    [
        (TINY, [vllm_key("other")], "The store has keys of model 'other', none of model 'tiny'."),
        (TINY, ["p@" + vllm_key()], "The store has keys of model 'tiny' with prefix 'p', none of model 'tiny'."),
        (TINY, [vllm_key("tiny" + SHARED)], f"keys of model 'tiny' in namespace '{SHARED}', none of model 'tiny'"),
        (TINY, [vllm_key(), vllm_key(tp=1)], "the store has keys of tp_rank 1, which are not asked for"),
        (TWO, [vllm_key()], "it has none of tp_rank 1"),
        (TINY, [vllm_key(), vllm_key(group=1)], "the store has keys of group 1, which are not asked for"),
        (TINY, [vllm_key(digest="ab" * 16)], "digests have 128 bits instead of 256: another hash"),
        (TINY, [vllm_key(), vllm_key(dcp=1)], "the store has keys of dcp 1, which are not asked for"),
        (SGLANG, [f"org-tiny_{DIGEST}_0_k"], "The store has keys of 'org-tiny', none of 't_org-tiny'."),
        (SGLANG, [f"t_org-tiny_{DIGEST}_0_{part}" for part in "kv"], "it has none of part _1_k, _1_v"),
        (SGLANG, [f"t_org-tiny_{DIGEST}__k"], "the store has keys of part __k, which are not asked for"),
    ],
)  # fmt: skip
def test_keys_that_differ(layout: VllmLayout | SglangLayout, keys: list[str], why: str) -> None:
    verdict = verify(keys, layout)
    assert verdict.agrees is False
    assert why in verdict.why


@pytest.mark.parametrize("layout", [TINY, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize(("keys", "why"), [([], "empty"), (["something"], "'something'")])
def test_nothing_to_tell_by(layout: VllmLayout | SglangLayout, keys: list[str], why: str) -> None:
    verdict = verify(keys, layout)
    assert verdict.agrees is None
    assert why in verdict.why


@pytest.mark.parametrize("part", ["tp_rank:", "pcp", "dcp", "pp_rank:", "group:"])
def test_a_rank_longer_than_any_number_is_no_rank(part: str) -> None:
    key = vllm_key().replace(f"{part}0", part + "9" * 5000)
    assert verify([key], TINY).agrees is None


@given(st.lists(st.text() | st.from_regex(r"[a-z]+@tp_rank:[0-9]{1,3}@pcp0@dcp0@pp_rank:0@group:0@[0-9a-f]+")))
def test_any_keys_have_a_verdict(keys: list[str]) -> None:
    for layout in (TINY, SGLANG):
        assert verify(keys, layout).why


TINY_QWEN = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TINY_QWEN | {"torch_dtype": "bfloat16"}, 1024),
        (TINY_QWEN | {"dtype": "torch.float32"}, 2048),
        ({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
          "torch_dtype": "bfloat16"}, 327_680),  # Llama 3 70B
        ({"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
          "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}, 70_272),  # DeepSeek V3
        ({"model_type": "vl", "text_config": TINY_QWEN | {"dtype": "bfloat16"}}, 1024),
        (TINY_QWEN | {"dtype": "bfloat16", "layer_types": ["full_attention", "sliding_attention"]}, 1024),
        (TINY_QWEN | {"dtype": "bfloat16", "layer_types": ["full_attention", "linear_attention"]}, None),
        (TINY_QWEN, None),
        ({"num_hidden_layers": True, "num_key_value_heads": 0, "head_dim": -1, "dtype": 5}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_bytes_per_token(config: dict[str, Any], expected: int | None) -> None:
    assert bytes_per_token(config) == expected


def test_bytes_per_token_of_another_type_in_the_cache() -> None:
    assert bytes_per_token(TINY_QWEN | {"dtype": "bfloat16"}, "fp8_e4m3") == 512


@given(st.dictionaries(st.sampled_from([*TINY_QWEN, "dtype", "text_config", "layer_types"]), json_values))
def test_any_config_has_a_size_or_none(config: dict[str, Any]) -> None:
    found = bytes_per_token(config)
    assert found is None or found > 0


LISTS = st.sampled_from([None, [], [{"size_": 3, "transport_endpoint_": "a:1"}], [{"object_size": 4}]])


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.fixed_dictionaries(
            {"ok": st.booleans()},
            optional=dict.fromkeys(("values", "disk_values", "local_disk_values", "nof_values"), LISTS),
        ),
    )
)
def test_what_is_there_is_told_the_same_in_short(data: dict[str, dict[str, object]]) -> None:
    body = json.dumps({"success": True, "data": data}).encode()
    assert read_present(body) == read_query(body).keys()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"success": false, "error": "no"}', b'{"success": true}', b"[" * 100_000]
)
def test_no_answer_tells_nothing_in_short_either(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_present(body)
