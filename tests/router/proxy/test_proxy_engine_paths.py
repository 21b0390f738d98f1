"""Engines' own paths: generate requests go where their prefix is, to the engine whose path it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.raw_client import Answered, RawClient, get, post
from tests.fakes.scripted_worker import Pages, ScriptedWorker, answer
from tests.router.proxy.running import running
from tests.router.security.files import write_keys

IDS = list(range(5, 205))
SGLANG = {"page_size": 4, "dp_size": 1, "max_total_num_tokens": 40_000, "version": "0.5.23"}


@pytest.fixture
async def of_sglang() -> AsyncIterator[Callable[..., Any]]:
    workers: list[ScriptedWorker] = []

    async def make(name: str, **said: object) -> ScriptedWorker:
        worker = ScriptedWorker(name, Pages(server_info={**SGLANG, **said}))
        workers.append(worker)
        await worker.listen()
        return worker

    yield make
    for worker in workers:
        await worker.__aexit__()


async def generate(client: RawClient, body: object, path: str = "/generate") -> Answered:
    return await client.ask(post(path, json.dumps(body).encode()))


async def test_a_conversation_of_token_ids_stays_where_it_is(of_sglang: Callable[..., Any]) -> None:
    workers = [await of_sglang(name) for name in "ab"]
    async with running(*workers, router_mode="kv", kv_policy="overlap") as router, router.client() as client:
        for who in range(6):
            own = [1000 + who, *IDS]
            first = await generate(client, {"input_ids": own, "sampling_params": {"max_new_tokens": 4}})
            again = await generate(client, {"input_ids": [*own, *IDS], "stream": True})
            assert first.header(b"x-router-worker") == again.header(b"x-router-worker")
            assert (first.header(b"x-router-overlap-tokens"), again.header(b"x-router-overlap-tokens")) == (
                b"0",
                b"200",
            )
    assert all(worker.requests for worker in workers), "and not all to one"


async def test_the_same_prompt_is_found_by_whatever_path_it_comes(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a")
    async with running(worker, router_mode="kv") as router, router.client() as client:
        await generate(client, {"input_ids": IDS})
        asked = {"model": "tiny", "prompt": IDS}
        found = await client.ask(post("/v1/completions", json.dumps(asked).encode()))
        assert found.header(b"x-router-overlap-tokens") == b"196", "the last block is computed again"
        apart = await generate(client, {"input_ids": IDS, "cache_salt": "s"})
        assert apart.header(b"x-router-overlap-tokens") == b"0"


async def test_text_is_tokenized_as_a_completions(a: ScriptedWorker) -> None:
    """By asking the engine here, one token for each letter."""
    ids = [ord(letter) for letter in "hello"]
    async with running(a, router_mode="kv") as router, router.client() as client:
        assert (await generate(client, {"token_ids": ids}, "/inference/v1/generate")).status == 200
        assert router.total("router_prompt_tokens_total") == 5
        assert router.total("router_untokenized_requests_total") == 0


async def test_images_are_matched_by_what_was_sent_before(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a")
    async with running(worker, router_mode="kv") as router, router.client() as client:
        for image, overlap in (("x", b"0"), ("x", b"1024"), ("y", b"0")):
            answered = await generate(client, {"input_ids": [7, 8], "image_data": image})
            assert int(answered.header(b"x-router-overlap-tokens") or 0) // 1024 == int(overlap) // 1024
        assert router.total("router_untokenized_requests_total", reason="multimodal") == 3


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_each_path_goes_to_its_own_engine(a: ScriptedWorker, of_sglang: Callable[..., Any], mode: str) -> None:
    b = await of_sglang("b")
    async with running(a, b, router_mode=mode) as router, router.client() as client:
        for _ in range(3):
            assert (await generate(client, {"input_ids": IDS})).header(b"x-router-worker") == b"b"
            own = await generate(client, {"token_ids": IDS, "sampling_params": {}}, "/inference/v1/generate")
            assert own.header(b"x-router-worker") == b"a"


async def test_sglangs_adapter_needs_the_name_that_makes_it_use_it(of_sglang: Callable[..., Any]) -> None:
    """To the bare one, it answers with the base model."""
    worker = await of_sglang("a")
    worker.pages.adapters = ["ad"]
    async with running(worker, router_mode="kv") as router, router.client() as client:
        for model, status in (("ad", 404), ("tiny:ad", 200)):
            body = json.dumps({"model": model, "prompt": IDS}).encode()
            answered = await client.ask(post("/v1/completions", body))
            assert answered.status == status
            assert status == 200 or b"these do: tiny, tiny:ad." in answered.body


async def test_an_adapter_is_no_model_where_the_engine_passes_over_it(
    a: ScriptedWorker, of_sglang: Callable[..., Any], tmp_path: Path
) -> None:
    """It would answer for the base model, which the key may not even be for."""
    b, model = await of_sglang("b"), "tiny:ad"
    b.pages.adapters = ["ad"]
    keys = write_keys(tmp_path, {"name": "one", "key": "kvr-one", "models": [model]})
    async with running(a, b, router_mode="kv", api_keys=keys) as router, router.client() as client:
        for path in ("/generate", "/classify"):
            body = json.dumps({"model": model, "text": "x"}).encode()
            answered = await client.ask(post(path, body, b"x-api-key: kvr-one", b"content-type: application/json"))
            assert (answered.status, json.loads(answered.body)["error"]["param"]) == (400, "model")
    assert not [*a.requests, *b.requests]


async def test_a_worker_that_is_named_must_run_its_engine(a: ScriptedWorker, of_sglang: Callable[..., Any]) -> None:
    b = await of_sglang("b")
    async with running(a, b, router_mode="direct") as router, router.client() as client:
        for name, status in (("a", 400), ("b", 200)):
            pinned = post("/generate", b'{"text":"x"}', b"x-router-target-worker: " + name.encode())
            assert (await client.ask(pinned)).status == status
    assert not a.requests


async def test_a_session_of_the_engine_is_not_known_to_be_cached(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a")
    async with running(worker, router_mode="kv") as router, router.client() as client:
        for path, prompt in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
            asked = {prompt: [len(path), *IDS], "session_params": {"id": "s"}}
            await generate(client, {prompt: asked[prompt]}, path)
            assert (await generate(client, asked, path)).header(b"x-router-overlap-tokens") == b"0"
        assert router.total("router_untokenized_requests_total", reason="untold") == 2


async def test_without_such_an_engine_it_says_so(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        answered = await generate(client, {"text": "hello"})
        assert (answered.status, json.loads(answered.body)["error"]["message"]) == (
            404,
            "/generate is a path of SGLang, and no worker runs it.",
        )


async def test_another_models_engine_is_of_no_use(a: ScriptedWorker, of_sglang: Callable[..., Any]) -> None:
    """OpenAI's clients would ask again after 503."""
    b = await of_sglang("b")
    b.pages.models = ["other"]
    async with running(a, b, router_mode="kv") as router, router.client() as client:
        answered = await generate(client, {"text": "hello", "model": "tiny"})
        assert (answered.status, json.loads(answered.body)["error"]["message"]) == (
            404,
            "/generate is a path of SGLang, and no worker that serves 'tiny' runs it.",
        )
        assert (await generate(client, {"text": "hello", "model": "other"})).status == 200


async def test_if_such_engines_are_down_it_says_so(a: ScriptedWorker, of_sglang: Callable[..., Any]) -> None:
    b = await of_sglang("b")
    async with running(a, b, router_mode="kv") as router, router.client() as client:
        await b.refuse()
        answers = [await generate(client, {"input_ids": IDS}) for _ in range(2)]
        assert {answered.status for answered in answers} <= {502, 503}
        assert "No worker that can take the request is up" in json.loads(answers[-1].body)["error"]["message"]
    assert not a.requests


async def test_a_rank_is_named_in_the_body(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a", dp_size=2)
    async with running(worker, router_mode="round-robin") as router, router.client() as client:
        for _ in range(2):
            await generate(client, {"text": "hello", "rid": "r"})
    bodies = [json.loads(request.body) for request in worker.requests]
    assert sorted(body.pop("routed_dp_rank") for body in bodies) == [0, 1]
    assert sorted(body.pop("data_parallel_rank") for body in bodies) == [0, 1]
    assert bodies == [{"text": "hello", "rid": "r"}] * 2


async def test_what_its_answer_reports_is_counted(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a")
    told = {"text": "x", "meta_info": {"prompt_tokens": 200, "completion_tokens": 1, "cached_tokens": 7}}
    worker.then(answer(json.dumps(told).encode()))
    async with running(worker, router_mode="kv") as router, router.client() as client:
        await generate(client, {"input_ids": IDS})
        assert router.total("router_reported_cached_tokens_total") == 7


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
async def test_only_posted_requests_are_served(a: ScriptedWorker, path: str) -> None:
    async with running(a) as router, router.client() as client:
        assert (await client.ask(get(path))).status == 405
        assert (await client.ask(post(path + "/", b"{}"))).status == 400
        assert (await client.ask(post(path, b"{"))).status == 400
    assert not a.requests


async def test_a_prompt_with_ids_that_the_model_has_not_is_refused(of_sglang: Callable[..., Any]) -> None:
    worker = await of_sglang("a")
    async with running(worker, router_mode="kv") as router, router.client() as client:
        answered = await generate(client, {"input_ids": [1, 2**40]})
        assert (answered.status, json.loads(answered.body)["error"]["param"]) == (400, "input_ids")
    assert not worker.requests


@pytest.mark.parametrize(
    "path", ["/detokenize", "/rerank", "/v2/rerank", "/score", "/classify", "/pooling", "/v2/embed"]
)
async def test_other_paths_for_clients_are_passed_on(a: ScriptedWorker, path: str) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        assert (await client.ask(post(path, b'{"model":"tiny"}'))).status == 200
        assert (await client.ask(post(path, b'{"model":"other"}'))).status == 200, "of one model, it judges the name"
        steered = await client.ask(post(path, b'{"bootstrap_host":"h"}'))
        assert steered.status == 400
    assert [request.target for request in a.requests] == [path.encode()] * 2


@pytest.mark.parametrize(
    "path",
    [
        *("/flush_cache", "/reset_prefix_cache", "/sleep", "/tokenize/x", "//tokenize", "/v2/x", "/abort_request", "/"),
        *("/%74okenize", "/tokenize;x", "/tokenize%2f", "/x/../tokenize", "/./tokenize", "/Tokenize"),
        *("//generate", "/%67enerate", "/generate;x", "/generate/.", "/generate%00", "/api/generate", "/encode"),
        *("/inference//v1/generate", "/inference/v1/%67enerate"),
        *("/inference/v1/abort_requests", "/inference/v1/../../reset_prefix_cache", "/rerank#x", "/v2//rerank"),
    ],
)
async def test_what_is_for_operators_is_not(a: ScriptedWorker, path: str) -> None:
    async with running(a) as router, router.client() as client:
        assert (await client.ask(post(path, b"{}"))).status == 404
    assert not a.requests


@pytest.mark.parametrize("ranks", [1, 2])
async def test_it_is_served_in_two_parts(of_sglang: Callable[..., Any], ranks: int) -> None:
    roles = ("prefill", "decode")
    p, d = [await of_sglang(role, disaggregation_mode=role, dp_size=ranks) for role in roles]
    prefilled, decoded = (
        {"text": "x", "meta_info": {"prompt_tokens": 200, "cached_tokens": cached}} for cached in (7, 0)
    )
    p.then(answer(json.dumps(prefilled).encode()))
    d.then(answer(json.dumps(decoded).encode()))
    async with running(p, d, router_mode="kv") as router, router.client() as client:
        answered = await generate(client, {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}})
        assert (answered.status, answered.header(b"x-router-prefill-worker")) == (200, b"prefill")
        assert json.loads(answered.body)["meta_info"]["cached_tokens"] == 7, "where the prompt was computed"
        assert router.samples("router_reported_cached_tokens_total") == {"prefill": 7}
    first, second = (json.loads(worker.requests[-1].body) for worker in (p, d))
    assert first["bootstrap_room"] == second["bootstrap_room"]
    assert ("routed_dp_rank" in first) == ("routed_dp_rank" in second) == (ranks > 1)
    assert first.get("routed_dp_rank") == second.get("disagg_prefill_dp_rank")
