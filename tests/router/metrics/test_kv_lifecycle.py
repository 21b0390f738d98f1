"""What is counted of blocks, by what their ranks say and by where requests are sent."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.description import EngineDescription, Model
from indexer.events import Cleared, EventBatch, Removed, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer, PromptHashes
from indexer.sampling import sample
from indexer.types import Tier, WorkerRank
from router.http.pool import Pool
from router.metrics.registry import Metrics
from router.model_config import block_bytes, read_config
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Choice, Decision
from router.workers.spec import parse_worker
from router.workers.worker import Worker

A, B = WorkerRank("a", 0), WorkerRank("b", 1)
SAMPLED, ANOTHER = sample(np.arange(5, 1000, dtype=np.uint64), 0)[:2]  # hashes that belong to the sample


class State:
    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = Metrics(lambda: self.now)
        self.indexer = KVIndexer(10.0, observer=self.metrics.lifecycle)
        self.numbers = {A: 0, B: 0}
        for rank in (A, B):
            self.indexer.watch(rank)

    def says(self, rank: WorkerRank, *events: Stored | Removed | Cleared, epoch: int = 1) -> None:
        self.indexer.on_batch(EventBatch(*rank, epoch, self.numbers[rank], list(events)))
        self.numbers[rank] += 1

    def read(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def blocks(self, fate: str, worker: str = "a", tier: str = "gpu", unit: str = "blocks") -> float | None:
        return self.read(f"router_kv_{fate}_{unit}_total", worker=worker, tier=tier)


@pytest.fixture
def state() -> State:
    return State()


def stored(*hashes: int, tier: Tier = Tier.GPU) -> Stored:
    return Stored(tier, pack_hashes(hashes))


PROMPT = PromptHashes(100, {16: np.array([SAMPLED, 1, 2, 3, 4, ANOTHER], np.uint64)})


def route(state: State, overlap: int | None, best: int | None, stored: int | None, loads: int = 0) -> None:
    """A prompt of 100 tokens is sent to `A`; the first and the last of its blocks of 16 belong to the sample."""
    decision = Decision(Candidates([(A, 16)]), Choice(0, None, ""), 100, overlap, best)
    decision.stored_tokens = loads
    state.metrics.lifecycle.routed(decision, 16, PROMPT, stored)


def test_created_is_new_to_the_fleet_and_stored_to_the_rank(state: State) -> None:
    state.says(A, stored(1, 2, 3), stored(1, tier=Tier.CPU))
    state.says(B, stored(2, 3, 4))
    assert [state.blocks(fate, who) for fate in ("created", "stored") for who in "ab"] == [3, 1, 3, 3]
    assert [state.blocks(fate, tier="cpu") for fate in ("created", "stored")] == [1, 1]
    assert state.blocks("stored", tier="disk") == 0


def test_removed_and_cleared_is_evicted(state: State) -> None:
    state.says(A, stored(1, 2, 3), stored(1, 2, tier=Tier.DISK))
    state.says(A, Removed(Tier.GPU, pack_hashes([1])))
    assert (state.blocks("evicted"), state.blocks("evicted", tier="disk")) == (1, 0)
    state.says(A, Cleared())
    assert (state.blocks("evicted"), state.blocks("evicted", tier="disk")) == (3, 2)
    assert state.blocks("expired") == 0


def test_a_rank_that_started_anew_and_what_was_only_assumed_expire(state: State) -> None:
    state.says(A, stored(1, 2, 3))
    state.numbers[A] = 0
    state.says(A, epoch=2)
    assert (state.blocks("expired"), state.blocks("evicted")) == (3, 0)
    state.indexer.predict(B, PROMPT.chain(16), state.now)
    state.indexer.expire(state.now + 10.0)
    assert state.blocks("expired", "b") == 6


def test_what_was_found_and_what_is_reused(state: State) -> None:
    route(state, overlap=32, best=64, stored=80, loads=48)
    assert [state.read("router_kv_looked_up_blocks_total", tier=tier) for tier in ("local", "store")] == [6, 6]
    assert [state.read("router_kv_found_blocks_total", tier=tier) for tier in ("local", "store")] == [4, 5]
    assert [state.blocks("reused", tier=tier) for tier in ("local", "store")] == [2, 3]


def test_without_a_store_none_is_looked_up(state: State) -> None:
    route(state, overlap=32, best=32, stored=None)
    assert [state.read("router_kv_looked_up_blocks_total", tier=tier) for tier in ("local", "store")] == [6, 0]
    route(state, overlap=None, best=None, stored=None)
    assert state.read("router_kv_looked_up_blocks_total", tier="local") == 6, "nothing was looked up"


def test_ages_are_those_of_the_sample(state: State) -> None:
    state.says(A, stored(SAMPLED, 1, 2))
    state.now += 7
    route(state, overlap=16, best=16, stored=None)
    route(state, overlap=16, best=16, stored=None)
    state.says(B, stored(SAMPLED))
    state.now += 20
    state.says(A, Removed(Tier.GPU, pack_hashes([SAMPLED, 1])))
    for name, seconds in (("first_reuse", 7), ("replication", 7)):
        assert state.read(f"router_kv_{name}_seconds_count") == 1
        assert state.read(f"router_kv_{name}_seconds_sum") == seconds
    assert state.read("router_kv_life_seconds_sum", tier="gpu") == 27
    state.says(B, Cleared())
    state.now += 1
    state.says(B, Removed(Tier.GPU, pack_hashes([SAMPLED])))
    assert state.read("router_kv_life_seconds_count", tier="gpu") == 1, "it was gone before"


def test_a_block_that_is_not_reached_is_not_reused(state: State) -> None:
    state.says(A, stored(SAMPLED, ANOTHER))
    route(state, overlap=0, best=16, stored=None)
    assert state.read("router_kv_first_reuse_seconds_count") == 0
    route(state, overlap=16, best=16, stored=None)
    assert state.read("router_kv_first_reuse_seconds_count") == 1


def test_a_prompt_hashed_before_a_worker_of_another_block_size_came(state: State) -> None:
    decision = Decision(Candidates([(A, 32)]), Choice(0, None, ""), 100, 64, 64)
    state.metrics.lifecycle.routed(decision, 32, PROMPT, None)
    assert state.blocks("reused", tier="local") == 2


async def test_bytes_are_told_where_they_are_known_only(state: State, tmp_path: Path) -> None:
    block = 16 * 2 * 2 * 2 * 64 * 2
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    worker = Worker(parse_worker("http://a:1,name=a,block_size=16"), Pool("http://a:1", 1))
    worker.description = EngineDescription("vllm", models=(Model("m", str(tmp_path)),))
    await state.metrics.lifecycle.learn(worker)
    state.says(A, stored(1, 2, 3))
    state.says(B, stored(4))
    assert (state.blocks("stored", unit="bytes"), state.blocks("stored", "b", unit="bytes")) == (3 * block, None)
    route(state, overlap=32, best=32, stored=None)
    assert state.blocks("reused", tier="local", unit="bytes") == 2 * block
    worker.description = EngineDescription("vllm", models=(Model("m", "elsewhere"),))
    await state.metrics.lifecycle.learn(worker)
    assert state.blocks("stored", unit="bytes") is None


async def test_what_is_counted_in_bytes_of_other_blocks_begins_at_zero(state: State, tmp_path: Path) -> None:
    """A counter that falls to anything but its beginning looks to Prometheus as if all of that had come since."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    worker = Worker(parse_worker("http://a:1,name=a,block_size=16"), Pool("http://a:1", 1))
    whole = EngineDescription("vllm", models=(Model("m", str(tmp_path)),))
    counts = []
    for described in (whole, whole, msgspec.structs.replace(whole, kv_dtype="fp8")):
        worker.description = described
        await state.metrics.lifecycle.learn(worker)
        state.says(B, stored(4))
        before = state.blocks("stored"), state.blocks("stored", unit="bytes")
        state.says(A, stored(1, 2, 3))
        counts.append((before, state.blocks("stored"), state.blocks("stored", unit="bytes")))
    block = 16 * 2 * 2 * 2 * 64 * 2
    assert counts == [
        ((None, None), 3, 3 * block),
        ((3, 3 * block), 6, 6 * block),
        ((None, None), 3, 3 * block / 2),
    ]
    assert state.blocks("stored", "b") == 3, "of other workers all is still told"


def test_of_a_worker_that_has_left_nothing_is_told(state: State) -> None:
    state.says(A, stored(SAMPLED))
    state.says(B, stored(2))
    state.indexer.forget(A)
    state.metrics.keep({"b"})
    assert (state.blocks("stored"), state.blocks("stored", "b")) == (None, 1)
    state.numbers[A] = 0
    state.indexer.watch(A)
    state.says(A, stored(SAMPLED), epoch=2)
    state.now += 5
    state.says(A, Removed(Tier.GPU, pack_hashes([SAMPLED])), epoch=2)
    assert state.read("router_kv_life_seconds_sum", tier="gpu") == 5


def test_what_is_being_loaded(state: State) -> None:
    state.metrics.lifecycle.loading = {"store": {B: 640}, "disk": {}, "cpu": {B: 160}}
    read = partial(state.read, "router_kv_loading_tokens", worker="b", dp_rank="1")
    assert [read(tier=tier) for tier in ("store", "disk", "cpu")] == [640, None, 160]


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("models", "dtype", "expected"),
    [
        (1, None, 16 * 2 * 2 * 2 * 64 * 2),
        (1, "auto", 16 * 2 * 2 * 2 * 64 * 2),
        (1, "fp8", 16 * 2 * 2 * 2 * 64),
        (1, "fp8_ds_mla", None),
        (2, None, None),
        (0, None, None),
    ],
)
def test_a_block_is_as_large_as_the_model_says(
    tmp_path: Path, models: int, dtype: str | None, expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    worker = Worker(parse_worker("http://a:1,block_size=16"), Pool("http://a:1", 1))
    assert block_bytes(worker) is None, "nothing is known of it"
    bases = tuple(Model(str(number), str(tmp_path)) for number in range(models))
    worker.description = EngineDescription("vllm", models=(*bases, Model("lora", "/x", parent="0")), kv_dtype=dtype)
    assert block_bytes(worker) == expected


def test_a_model_that_is_elsewhere_or_must_not_be_read_has_no_known_size(tmp_path: Path) -> None:
    worker = Worker(parse_worker("http://a:1"), Pool("http://a:1", 1))
    worker.description = EngineDescription("vllm", models=(Model("m", "org/m"),))
    assert block_bytes(worker) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    worker.description = EngineDescription("vllm", models=(Model("m", str(tmp_path)),))
    assert block_bytes(worker, [str(tmp_path.parent)])
    assert block_bytes(worker, [str(tmp_path / "within")]) is None


@pytest.mark.parametrize("config", [b"", b"[]", b"\xff", b'{"a": "\xff"}', b'{"a": ' + b"[" * 100_000])
def test_a_config_that_makes_no_sense_tells_nothing(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    assert read_config(str(tmp_path)) == {}
