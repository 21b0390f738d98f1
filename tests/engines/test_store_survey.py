"""What a store's keys and its master's own figures tell to whoever looks after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.store import (
    Counted,
    Health,
    Kept,
    SglangLayout,
    VllmGroup,
    VllmLayout,
    read_counted,
    read_health,
    survey,
)
from indexer.hashing import pack_tokens
from indexer.types import PLAIN

TOKENS = pack_tokens(list(range(48)))


def keys(layout: VllmLayout | SglangLayout) -> list[str]:
    return [key for digest in layout.hashes(TOKENS, PLAIN) or [] for key in layout.keys(digest)]


def vllm(model: str = "tiny", **more: object) -> VllmLayout:
    return VllmLayout(model=model, block_size=16, **more)  # type: ignore[arg-type]


def test_each_layout_is_told_with_its_ranks() -> None:
    two = keys(vllm("big", tp=2, pp=3))
    sglang = keys(SglangLayout(model="org/tiny", block_size=16, tp=4, tag="t"))
    found = survey([*two, *sglang, *keys(vllm()), "another"])
    assert found == [
        Kept(engine="sglang", model="t_org-tiny", keys=24, blocks=3, parts=8, tp=4, digest_bits=256),
        Kept(engine="vllm", model="big", keys=18, blocks=3, parts=6, tp=2, pp=3, digest_bits=256),
        Kept(engine="vllm", model="tiny", keys=3, blocks=3, parts=1, digest_bits=256),
        Kept(engine="unknown", model="", keys=1, blocks=0, parts=0),
    ]


def test_prefix_namespace_groups_and_stages_tell_layouts_apart() -> None:
    apart = "@store_tp:4@store_pp:1@store_format:f"
    grouped = vllm(groups=(VllmGroup(0), VllmGroup(3)))
    found = survey([*keys(vllm(prefix="a@b")), *keys(vllm(namespace=apart))[:2], *keys(grouped)])
    assert [(one.model, one.namespace, one.groups, one.parts) for one in found] == [
        ("tiny", "", 2, 2),
        ("a@b@tiny", "", 1, 1),
        ("tiny", apart, 1, 1),
    ]
    [staged] = survey(keys(SglangLayout(model="m", block_size=16, tp=2, pp=2)))
    assert (staged.tp, staged.pp, staged.parts) == (2, 2, 8)


@given(st.lists(st.text()))
def test_any_keys_are_counted(listed: list[str]) -> None:
    assert sum(one.keys for one in survey(listed)) == len(listed)


def test_health_of_a_leader_and_of_masters_that_say_less() -> None:
    leader = (
        b'{"status":"ok","role":"leader","ha_state":"serving","service_ready":true,"leader_address":null,'
        b'"view_version":null}'
    )
    assert read_health(leader) == Health("leader", "serving", True, None)
    standby = b'{"role":"standby","ha_state":"watching","service_ready":false,"leader_address":"10.0.0.9:50051"}'
    assert read_health(standby) == Health("standby", "watching", False, "10.0.0.9:50051")
    assert read_health(b"OK") == read_health(b"[]") == Health()


def test_counts_are_read_where_they_are() -> None:
    page = b"""# HELP master_key_count keys
# TYPE master_key_count gauge
master_key_count 6
master_soft_pin_key_count 1
segment_allocated_bytes{segment="127.0.0.1:13829"} 24576
master_allocated_bytes 24576
master_total_capacity_bytes 67108864
master_successful_evictions_total 2
master_evicted_key_count 40
master_evicted_size_bytes 163840
"""
    assert read_counted(page) == Counted(
        keys=6,
        pinned_keys=1,
        capacity_bytes=67108864,
        used_bytes=24576,
        evictions=2,
        evicted_keys=40,
        evicted_bytes=163840,
    )
    assert read_counted(b"") == Counted()
