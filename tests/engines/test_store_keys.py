"""Names of blocks in Mooncake Store, against real keys: from a recorded store, and from the engines' own code."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.events import BlockStored, EngineBatch
from engines.sglang.decode import decode as decode_sglang
from engines.store import (
    DEFAULT_SEED,
    Digest,
    HashName,
    Layout,
    SglangLayout,
    VllmGroup,
    VllmLayout,
    read_keys,
    verify,
)
from engines.vllm.decode import decode
from indexer.hashing import Tokens, pack_tokens
from indexer.types import PLAIN, EngineHash, Namespace
from tests.engines.recordings import answer, payloads

GOLDEN = Path(__file__).parents[1] / "real/store/golden"
LORAS = {"adapter": "/models/adapter"}
BLOCK = 16
TINY = VllmLayout(model="tiny", block_size=BLOCK)
HASHES: tuple[HashName, ...] = ("sha256", "sha256_cbor")


def cases(engine: str, holding: str) -> list[dict[str, Any]]:
    lines = (GOLDEN / f"{engine}.jsonl").read_text().splitlines()
    return [case for case in map(json.loads, lines) if holding in case]


def name_of(case: dict[str, Any]) -> str:
    told = ("hash", "hash_seed", "lora", "salt", "tp", "pp", "kv_heads", "holds", "mla", "tag", "prefix")
    return " ".join(f"{key}={case[key]}" for key in told if case.get(key) is not None)


@pytest.mark.parametrize("case", cases("vllm", "digests"), ids=name_of)
def test_digests_are_those_of_vllm(case: dict[str, Any]) -> None:
    seed = case.get("hash_seed") or DEFAULT_SEED
    layout = VllmLayout(model="m", block_size=case["block_size"], hash=case["hash"], hash_seed=seed, loras=LORAS)
    assert_digests(layout, case)


@pytest.mark.parametrize("case", cases("sglang", "digests"), ids=name_of)
def test_digests_are_those_of_sglang(case: dict[str, Any]) -> None:
    assert_digests(SglangLayout(model="m", block_size=case["block_size"], loras=LORAS), case)


def assert_digests(layout: Layout, case: dict[str, Any]) -> None:
    """Whole, and continued from each block."""
    tokens, namespace = pack_tokens(case["tokens"]), Namespace(case.get("lora"), case.get("salt"))
    digests = layout.hashes(tokens, namespace)
    assert digests is not None
    assert [digest.hex() for digest in digests] == case["digests"]
    for number, digest in enumerate(digests, 1):
        assert layout.hashes(tokens[number * layout.block_size :], namespace, digest) == digests[number:]


@pytest.mark.parametrize("case", cases("vllm", "keys"), ids=name_of)
def test_keys_are_those_of_vllm(case: dict[str, Any]) -> None:
    groups = tuple(VllmGroup(number, holds) for number, holds in enumerate(case["holds"]))
    layout = VllmLayout(
        model=case["model"],
        block_size=BLOCK,
        tp=case["tp"],
        pp=case.get("pp", 1),
        kv_heads=case["kv_heads"],
        prefix=case.get("prefix", ""),
        groups=groups,
    )
    keys = keys_of_last_block(layout, case)
    assert sorted(keys) == sorted(case["asked"])
    assert set(keys) <= set(case["keys"])
    assert set(keys) == set(case["keys"]) or case["tp"] % case["kv_heads"]  # as vLLM: uneven heads leave a rank out


@pytest.mark.parametrize("case", cases("vllm-running", "stored"), ids=name_of)
def test_keys_are_those_that_a_running_vllm_stored(case: dict[str, Any]) -> None:
    layout = VllmLayout(
        model=case["model"],
        block_size=case["block_size"],
        hash=case["hash"],
        hash_seed=case["hash_seed"] or DEFAULT_SEED,
        tp=case.get("tp", 1),
        kv_heads=case.get("kv_heads"),
    )
    digests = layout.hashes(pack_tokens(case["tokens"]), Namespace(cache_salt=case["salt"]))
    assert digests is not None
    assert sorted(key for digest in digests for key in layout.keys(digest)) == case["stored"]
    assert verify(case["stored"], layout).agrees


@pytest.mark.parametrize("case", cases("sglang", "keys"), ids=name_of)
def test_keys_are_those_of_sglang(case: dict[str, Any]) -> None:
    layout = SglangLayout(
        model=case["model"], block_size=16, tp=case["tp"], pp=case["pp"], mla=case["mla"], tag=case["tag"]
    )
    assert sorted(keys_of_last_block(layout, case)) == case["keys"]


def keys_of_last_block(layout: Layout, case: dict[str, Any]) -> tuple[str, ...]:
    digests = layout.hashes(pack_tokens(case["tokens"]), PLAIN)
    assert digests is not None
    return layout.keys(digests[-1])


def test_recorded_store_has_the_names_of_recorded_blocks() -> None:
    """A real vLLM's blocks, as its events tell them, and the first keys that the master listed."""
    layout = VllmLayout(model="tiny", block_size=32)
    digests = recorded_digests(layout, decode, "vllm-0.32.0-mooncake")
    listed = read_keys(answer("vllm-0.32.0-mooncake", "master /get_all_keys").body)
    assert len(listed) == 8
    assert set(listed) <= {key for digest in digests for key in layout.keys(digest)}
    assert verify(listed, layout).agrees


def test_recorded_pages_are_hashed_as_in_the_store() -> None:
    """But for salted ones, whose events have a seed of their own."""
    layout = SglangLayout(model="tiny", block_size=16)
    assert len(recorded_digests(layout, decode_sglang, "sglang-0.5.23", salted=False)) > 100


def recorded_digests(
    layout: Layout, decoded: Callable[[bytes], EngineBatch], recording: str, *, salted: bool = True
) -> list[Digest]:
    """Of all blocks that an engine told of; each is called as the engine called it."""
    digests: dict[int, Digest] = {}
    batches = map(decoded, payloads(recording))
    for stored in [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]:
        if salted or stored.namespace == PLAIN:
            parent = None if stored.parent is None else digests[unsigned(stored.parent)]
            found = layout.hashes(pack_tokens(stored.token_ids), stored.namespace, parent)
            assert found is not None
            names = list(map(unsigned, stored.engine_hashes))
            part = slice(-8, None) if isinstance(layout, VllmLayout) else slice(8)
            assert [int.from_bytes(digest[part], "big") for digest in found] == names
            digests |= zip(names, found, strict=True)
    return list(digests.values())


def unsigned(name: EngineHash) -> int:
    assert not isinstance(name, bytes)
    return int(name) % 2**64


token_lists = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**31]))
texts = st.none() | st.text(max_size=300).filter(lambda text: len(text) != 1)


@given(tokens=token_lists, block=st.integers(4, 40), lora=texts, salt=texts)
@example(tokens=[1] * 4, block=4, lora=None, salt="ü" * 127 + "x")  # 255 bytes, the most of a short text
@example(tokens=[1] * 4, block=4, lora=None, salt="ü" * 128)
def test_digests_are_of_what_pickle_writes(tokens: list[int], block: int, lora: str | None, salt: str | None) -> None:
    layout = VllmLayout(model="m", block_size=block, loras={} if lora is None else {lora: "/path"})
    # A text of its own: pickle writes one that it has seen only once.
    salts, parent, expected = [("cache_salt", "".join(list(salt)))] if salt else [], pickled(DEFAULT_SEED), []
    loras = [] if lora is None else [("lora", lora, "/path")]
    for at in range(0, len(tokens) - block + 1, block):
        extra = (*loras, *(salts if at == 0 else []))
        parent = pickled((parent, tuple(tokens[at : at + block]), extra or None))
        expected.append(parent)
    assert layout.hashes(pack_tokens(tokens), Namespace(lora, salt)) == expected


def pickled(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


@pytest.mark.parametrize("block", [4, 255, 256, 8192])
def test_smallest_and_largest_blocks(block: int) -> None:
    tokens = np.arange(block, dtype=np.uint32) * np.uint32(7919)
    layout = VllmLayout(model="m", block_size=block)
    assert layout.hashes(tokens, PLAIN) == [pickled((pickled(DEFAULT_SEED), tuple(tokens.tolist()), None))]


@pytest.mark.parametrize("name", HASHES)
def test_salt_is_in_the_first_block_only(name: HashName) -> None:
    layout = VllmLayout(model="m", block_size=BLOCK, hash=name)
    tokens, salted = tokens_of(48), Namespace(cache_salt="s" * 300)
    digests = layout.hashes(tokens, salted)
    assert digests is not None
    assert digests[0] not in (layout.hashes(tokens, PLAIN) or [])
    assert layout.hashes(tokens[16:], PLAIN, digests[0]) == digests[1:]
    assert layout.hashes(tokens, Namespace(cache_salt="")) == layout.hashes(tokens, PLAIN)


@pytest.mark.parametrize("layout", [TINY, SglangLayout(model="tiny", block_size=16)], ids=["vllm", "sglang"])
def test_adapter_that_is_not_known_has_no_names(layout: Layout) -> None:
    assert layout.hashes(tokens_of(32), Namespace("adapter")) is None


@pytest.mark.parametrize("layout", [TINY, SglangLayout(model="tiny", block_size=16)], ids=["vllm", "sglang"])
@pytest.mark.parametrize("tokens", [0, 15])
def test_less_than_a_block_has_no_names(layout: Layout, tokens: int) -> None:
    assert layout.hashes(tokens_of(tokens), PLAIN) == []
    assert layout.hashes(tokens_of(tokens), Namespace(cache_salt="salt")) == []


def test_what_cannot_be_known_is_said() -> None:
    layout = VllmLayout(model="m", block_size=3)
    assert layout.problem
    assert layout.hashes(tokens_of(64), PLAIN) is None
    verdict = verify(["m@tp_rank:0"], layout)
    assert verdict.agrees is None
    assert layout.problem in verdict.why


@pytest.mark.parametrize("prefix", ["", "p"])
def test_a_models_name_may_look_like_one_with_a_prefix(prefix: str) -> None:
    layout = VllmLayout(model="/models/m@v2", block_size=16, prefix=prefix)
    assert verify(layout.keys(bytes(32)), layout).agrees
    assert verify(VllmLayout(model="v2", block_size=16).keys(bytes(32)), layout).agrees is False


@pytest.mark.parametrize("layout", [VllmLayout(model="m,n", block_size=16), SglangLayout(model="m,n", block_size=16)])
def test_keys_that_cannot_be_asked_for_are_a_problem(layout: Layout) -> None:
    """Several stand in one question, with commas between."""
    assert "comma" in (layout.problem or "")
    assert layout.hashes(tokens_of(64), PLAIN) is None
    assert verify(layout.keys(bytes(32)), layout).agrees is None


def tokens_of(count: int) -> Tokens:
    return np.arange(count, dtype=np.uint32) * np.uint32(331)
