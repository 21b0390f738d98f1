"""What a model's blocks are called in the store follows the workers that are there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from engines.description import EngineDescription, EngineKind, Model
from engines.store import VllmLayout
from indexer.hashing import pack_tokens
from indexer.kv_indexer import hash_prompt
from indexer.types import PLAIN, Namespace
from router.context import Prompt
from router.http.pool import Pool
from router.store.keeper import StoreKeeper
from router.store.master import Query
from router.store.shared_store import SharedStore, layout_of
from router.store.spec import StoreSpec
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.fakes.store_master import Master, serving

IDS: Final = list(range(1, 129))


def worker(name: str, block_size: int, kind: EngineKind = "vllm") -> Worker:
    url = f"http://{name}:8000"
    made = Worker(parse_worker(f"{url},name={name}"), Pool(url, 1.0))
    made.description = described(block_size, kind)
    return made


def described(block_size: int, kind: EngineKind = "vllm") -> EngineDescription:
    return EngineDescription(kind, models=(Model("m"),), block_size=block_size)


class Scene:
    def __init__(self, master: Master, store: SharedStore, fleet: Fleet) -> None:
        self.master, self.store, self.fleet = master, store, fleet

    async def comes_up(self, one: Worker) -> None:
        await self.store.learn(one)
        self.fleet.add(one)
        self.fleet.mark_up(one)

    async def found(self, model: str = "m") -> int:
        namespace = Namespace(self.fleet.lora_name(model))
        hashes = hash_prompt(IDS, self.fleet.block_sizes, namespace)
        return await self.store.leading_tokens(Prompt(len(IDS), hashes, pack_tokens(IDS), namespace), model)


@asynccontextmanager
async def scene(block_size: int, hash_seed: str | None = None) -> AsyncIterator[Scene]:
    """A store that has the whole prompt, in blocks of `block_size`."""
    async with serving(VllmLayout(model="m", block_size=block_size)) as master:
        master.put(pack_tokens(IDS), len(IDS) // block_size)
        async with aiohttp.ClientSession() as session:
            fleet = Fleet([])
            spec = StoreSpec(url=master.url, budget_ms=10_000, hash_seed=hash_seed)
            store = SharedStore(spec, fleet, session, lambda: 0.0)
            yield Scene(master, store, fleet)
            await store.close()


async def test_blocks_have_another_size_once_nobody_has_the_first() -> None:
    async with scene(block_size=32) as made:
        old, new = worker("old", 16), worker("new", 32)
        await made.comes_up(old)
        assert await made.found() == 0
        await made.comes_up(new)
        assert await made.found() == 0, "the old worker goes on"
        made.fleet.remove(old)
        await made.comes_up(new)
        assert await made.found() == len(IDS)


async def test_only_who_names_blocks_as_they_are_looked_up_is_counted_on_to_load_them() -> None:
    async with scene(block_size=16) as made:
        first, second, larger = worker("first", 16), worker("second", 16), worker("larger", 32)
        for one in (first, second, larger, worker("large", 32)):
            await made.comes_up(one)
        for kind in ("sglang", "unknown"):
            await made.comes_up(worker(kind, 16, kind))
        assert counted_on(made.fleet) == {"first", "second"}
        for one in (first, second):
            made.fleet.remove(one)
        await made.comes_up(larger)
        assert counted_on(made.fleet) == {"larger", "large"}


def counted_on(fleet: Fleet) -> set[str]:
    """Workers that are taken to load what the store has."""
    ranks = fleet.candidates("m").whole
    return {rank.worker_id for rank, loads in zip(ranks.ranks, ranks.uses_store.tolist(), strict=True) if loads}


async def test_a_worker_that_comes_back_otherwise_is_followed_and_what_was_counted_stays() -> None:
    async with scene(block_size=32) as made:
        same = worker("w", 16)
        await made.comes_up(same)
        await made.found()
        same.description = described(32)
        await made.comes_up(same)
        assert await made.found() == len(IDS)
        assert answered(made.store) == 2


async def test_what_was_counted_stays_where_names_are_not_known_any_more() -> None:
    async with scene(block_size=32) as made:
        same = worker("w", 32)
        await made.comes_up(same)
        await made.found()
        same.description = replace(described(32), version="0.28.0")
        await made.comes_up(same)
        assert not list(made.store.hottest(1, 0.0))
        assert answered(made.store) == 1


async def test_models_that_nobody_has_any_more_are_forgotten_once_others_come() -> None:
    async with scene(block_size=32) as made:
        leaving = [serves("m"), serves("n", version="0.28.0")]
        for one in leaving:
            await made.comes_up(one)
        assert (followed(made.store), set(made.store.problems)) == ({"m"}, {"n"})
        for one in leaving:
            made.fleet.remove(one)
        assert followed(made.store) == {"m"}, "another with that model may come"
        await made.comes_up(serves("m2"))
        assert (followed(made.store), set(made.store.problems)) == ({"m2"}, {"m2"})


async def test_names_may_be_compared_while_models_are_forgotten() -> None:
    async with scene(block_size=32) as made:
        leaving = [serves("m", "sglang"), serves("n", "sglang")]
        for one in leaving:
            await made.comes_up(one)
        for one in leaving:
            made.fleet.remove(one)
        await asyncio.gather(made.store.learn(serves("m2")), made.store.compare())
        assert followed(made.store) == {"m2"}


def serves(model: str, kind: EngineKind = "vllm", version: str | None = None) -> Worker:
    made = worker(model, 32, kind)
    made.description = replace(described(32, kind), models=(Model(model),), version=version)
    return made


def followed(store: SharedStore) -> set[str]:
    """Models of which prompts are looked up."""
    return {model for model, _, _ in store.hottest(1, 0.0)}


def answered(store: SharedStore) -> float:
    """Look-ups that the master answered, as /metrics has it."""
    samples = [sample for metric in store.collect() for sample in metric.samples]
    (found,) = (each.value for each in samples if each.labels.get("outcome") == "answered")
    return found


@pytest.mark.parametrize(
    ("version", "stated", "known"),
    [("0.28.0", None, False), ("0.28.0", "0", True), ("0.29.0", None, True), (None, None, True)],
)
async def test_a_seed_that_vllm_draws_is_told_of(version: str | None, stated: str | None, known: bool) -> None:
    """The keys look alike, and none would ever be found."""
    old = worker("old", 32)
    old.description = replace(described(32), version=version)
    async with scene(block_size=32, hash_seed=stated) as made:
        await made.comes_up(old)
        problem = made.store.problems.get("m", "")
        assert ("hash_seed" in problem) is not known


@pytest.mark.parametrize(("version", "start"), [("0.5.16", ""), ("0.5.17", "m_"), (None, "m_")])
def test_sglang_names_its_model_in_keys_since_0_5_17(version: str | None, start: str) -> None:
    one = worker("w", 16, kind="sglang")
    one.description = replace(described(16, "sglang"), version=version)
    layout = layout_of(one, Model("m"), StoreSpec(url="http://store:9003"))
    assert layout
    digests = layout.hashes(pack_tokens(IDS[:16]), PLAIN)
    assert digests
    assert layout.keys(digests[0])[0].startswith(start + digests[0].hex())


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({}, 8),
        ({"num_key_value_heads": 4}, 4),
        ({"num_key_value_heads": 4, "kv_lora_rank": 512}, 1),
        ({"num_key_value_heads": 4, "kv_lora_rank": None}, 4),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_heads_are_those_of_the_language_model(
    tmp_path: Path, said: dict[str, int | None], ranks: int, *, nested: bool
) -> None:
    """A model that takes images too has them a level deeper."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": said} if nested else said), "utf-8")
    layout = layout_of(worker("w", 16), Model("m", root=str(tmp_path)), StoreSpec(url="http://store:9003", tp=8))
    assert layout
    assert len(layout.keys(bytes(32))) == ranks


def with_adapter(name: str, path: str) -> EngineDescription:
    return EngineDescription("vllm", models=(Model("m"), Model(name, root=path, parent="m")), block_size=16)


def put_of_adapter(master: Master, name: str, path: str) -> None:
    master.layout = VllmLayout(model="m", block_size=16, loras={name: path})
    master.put(pack_tokens(IDS), len(IDS) // 16, Namespace(name))


async def test_adapters_of_all_workers_are_known() -> None:
    async with scene(block_size=16) as made:
        for name in ("a", "b"):
            put_of_adapter(made.master, name, f"/adapters/{name}")
            one = worker(name, 16)
            one.description = with_adapter(name, f"/adapters/{name}")
            await made.comes_up(one)
        await made.comes_up(worker("c", 16))
        assert [await made.found(name) for name in ("a", "b", "m")] == [len(IDS)] * 3
        assert made.master.listed == 1


async def test_an_adapter_may_be_loaded_while_its_worker_serves_and_from_elsewhere_later() -> None:
    async with scene(block_size=16) as made:
        one = worker("w", 16)
        await made.comes_up(one)
        for path in ("/adapters/first", "/adapters/second"):
            made.fleet.redescribe(one, with_adapter("poet", path))
            assert await made.found("poet") == 0
            put_of_adapter(made.master, "poet", path)
            assert await made.found("poet") == len(IDS)


async def test_a_model_may_come_while_the_master_is_asked_for_what_is_hot() -> None:
    async with scene(block_size=16) as made:
        await made.comes_up(worker("w", 16))
        other = worker("other", 16)
        other.description = EngineDescription("vllm", models=(Model("n"),), block_size=16)
        await made.found()
        await made.found()
        for _ in made.store.hottest_prompts(1):
            await made.comes_up(other)
        assert [model for model, _, _ in made.store.hottest(1, 0.0)] == ["m", "n"]


async def test_what_is_kept_is_hottest_of_all_models_not_of_the_first() -> None:
    async with scene(block_size=16) as made:
        await made.comes_up(worker("w", 16))
        other = worker("other", 16)
        other.description = EngineDescription("vllm", models=(Model("n"),), block_size=16)
        await made.comes_up(other)
        layout = VllmLayout(model="n", block_size=16)
        digests = layout.hashes(pack_tokens(IDS), PLAIN) or []
        made.master.there.update(key for digest in digests for key in layout.keys(digest))
        for model in ["m"] * 6 + ["n"] * 20:
            assert await made.found(model) == len(IDS)
        assert await StoreKeeper(made.store, budget=len(digests)).renew() == len(digests)
        assert {key.partition("@")[0] for key in made.master.leased} == {"n"}


async def test_an_engine_of_no_known_kind_is_no_reason_to_forgo_the_store() -> None:
    async with scene(block_size=16) as made:
        await made.comes_up(worker("strange", 16, kind="unknown"))
        assert "none whose keys are known" in made.store.problems["m"]
        await made.comes_up(worker("w", 16))
        assert not made.store.problems
        assert await made.found() == len(IDS)
        await made.comes_up(worker("strange", 16, kind="unknown"))
        assert await made.found() == len(IDS)


async def test_whatever_goes_wrong_in_a_look_up_the_store_has_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Query) -> set[str]:
        raise KeyError("of whatever kind")

    async with scene(block_size=16) as made:
        await made.comes_up(worker("w", 16))
        monkeypatch.setattr(Query, "present", fail)
        assert await made.found() == 0
        assert "A prompt could not be looked up in the store" in caplog.messages
        monkeypatch.undo()
        assert await made.found() == len(IDS)


async def test_what_is_found_has_the_names_that_are_asked_for() -> None:
    """No list of all keys is needed to know that."""
    async with scene(block_size=16) as made:
        ours, made.master.there = made.master.there, set()
        await made.comes_up(worker("w", 16))
        made.master.there = ours
        assert await made.found() == len(IDS)
        await made.store.compare()
        assert made.master.listed == 1


async def test_the_store_is_up_while_its_master_answers_whatever_it_was_asked_about() -> None:
    async with scene(block_size=16) as made:
        await made.comes_up(worker("w", 16))
        other = worker("other", 16)
        other.description = EngineDescription("vllm", models=(Model("n"),), block_size=16)
        await made.comes_up(other)
        made.master.answer = lambda: web.Response(status=500)
        await made.found("n")
        assert not made.store.healthy
        made.master.answer = None
        made.fleet.remove(other)  # so that nobody asks for its model any more
        assert await made.found() == len(IDS)
        assert made.store.healthy


async def test_a_master_that_comes_later_is_up_before_anything_is_looked_up() -> None:
    async with scene(block_size=16) as made:
        made.master.keys_answer = lambda: web.Response(status=500)
        await made.comes_up(worker("w", 16))
        assert not made.store.healthy
        made.master.keys_answer = None
        await made.store.compare()
        assert made.store.healthy


async def test_names_are_compared_until_they_agree(caplog: pytest.LogCaptureFixture) -> None:
    """A store is empty at first."""
    async with scene(block_size=16) as made:
        ours, made.master.there = made.master.there, set()
        await made.comes_up(worker("w", 16))
        assert not made.store.problems
        made.master.there = {key.replace("m@tp", "other@tp") for key in ours}
        for _ in range(2):
            await made.store.compare()
            assert "'other'" in made.store.problems["m"]
        assert caplog.messages.count("The store may not help this model") == 1
        made.master.there = set()
        await made.store.compare()
        assert made.store.problems, "what is empty tells nothing new"
        made.master.there = ours
        await made.store.compare()
        assert not made.store.problems
        listed = made.master.listed
        await made.store.compare()
        assert made.master.listed == listed, "which takes a master long"
