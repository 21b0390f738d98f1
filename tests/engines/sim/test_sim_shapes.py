"""Answers have the fields that recorded answers of real engines have."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.engines.recordings import answer, exchanges
from tests.engines.sim.fleets import Client, client, events

NAMES = {"vllm": "vllm-0.32.0", "sglang": "sglang-0.5.23"}
FLAVOURS = sorted(NAMES)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": list(range(65)), "max_tokens": 3}


def shape(value: Any) -> Any:
    """Field names all the way down, in order; of values only whether there is one."""
    if isinstance(value, dict):
        return [(name, shape(inner)) for name, inner in value.items()]
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]] if value and isinstance(value[0], dict) else "list"
    return None if value is None else "value"


def recorded(flavour: str, step: str) -> Any:
    return json.loads(answer(NAMES[flavour], step).body)


def recorded_stream(flavour: str, step: str) -> list[Any]:
    found = next(exchange for exchange in exchanges(NAMES[flavour]) if exchange["step"].startswith(step))
    body: str = found["response"]["body"]
    return events(body.encode())


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_completion(flavour: str) -> None:
    async with client(flavour=flavour) as worker:
        made = await worker.complete(**TEXT)
        assert shape(made) == shape(recorded(flavour, "completion B"))
        assert list(made["id"]).count("-") == (flavour == "vllm")


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_chat(flavour: str) -> None:
    async with client(flavour=flavour) as worker:
        _, made = await worker.post("/v1/chat/completions", CHAT)
        real = recorded(flavour, "chat 1")
        if flavour == "vllm":
            real["usage"]["prompt_tokens_details"]["created_cache_tokens"] = None  # not modelled
        assert shape(made) == shape(real)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("path", "body", "step"),
    [("/v1/completions", TEXT, "streamed completion"), ("/v1/chat/completions", CHAT, "streamed chat")],
)
async def test_streams(flavour: str, path: str, body: dict[str, Any], step: str) -> None:
    async with client(flavour=flavour) as worker:
        made = await worker.stream(path, {**body, "stream_options": {"include_usage": True}})
        real = recorded_stream(flavour, step)
        for chunk in real:
            if flavour == "vllm" and isinstance(chunk, dict) and "usage" in chunk and "chat" in step:
                chunk["usage"]["prompt_tokens_details"]["created_cache_tokens"] = None  # not modelled
        assert [shape(chunk) for chunk in made] == [shape(chunk) for chunk in real]


@pytest.mark.parametrize(
    ("flavour", "step", "body"),
    [
        ("vllm", "unknown model", {"prompt": [1], "model": "nope"}),
        ("vllm", "prompt too long", {"prompt": [7] * 4000}),
        ("sglang", "prompt too long", {"prompt": [7] * 4000}),
    ],
)
async def test_errors(flavour: str, step: str, body: dict[str, Any]) -> None:
    async with client(flavour=flavour) as worker:
        status, made = await worker.post("/v1/completions", body)
        assert status == answer(NAMES[flavour], step).status
        assert shape(made) == shape(recorded(flavour, step))


@pytest.mark.parametrize(
    ("flavour", "path"),
    [
        ("vllm", "/v1/models"),
        ("vllm", "/version"),
        ("vllm", "/kv_event_sources"),
        ("vllm", "/load"),
        ("sglang", "/v1/models"),
    ],
)
async def test_pages(flavour: str, path: str) -> None:
    async with client(flavour=flavour) as worker:
        made, real = await worker.get(path), recorded(flavour, f"GET {path}")
        for card in real.get("data", []):
            card.pop("permission", None)
        for card in made.get("data", []):
            card.pop("permission", None)
        assert shape(made) == shape(real)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nope", 404, None),
        ("POST", "/v1/embeddings", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("POST", "/health", 405, "GET"),
        ("HEAD", "/health", 405, "GET"),
        ("HEAD", "/v1/models", 405, "GET"),
    ],
)
async def test_what_is_not_served(flavour: str, method: str, path: str, status: int, allowed: str | None) -> None:
    """The answers of FastAPI, in which both engines are written; its GETs are no HEADs."""
    async with client(flavour=flavour) as worker, worker.session.request(method, worker.url + path) as response:
        assert response.status == status
        assert response.headers.get("Allow") == allowed
        assert response.content_type == "application/json"
        detail = {404: "Not Found", 405: "Method Not Allowed"}[status]
        assert await response.text() == ("" if method == "HEAD" else f'{{"detail":"{detail}"}}')


async def test_vllm_tokenizes_on_one_path_only() -> None:
    async with client() as worker:
        assert (await worker.post("/v1/tokenize", {"prompt": "text"}))[0] == 404


async def test_sglangs_tokenize() -> None:
    async with client(flavour="sglang") as worker:
        _, made = await worker.post("/v1/tokenize", {"prompt": "text"})
        assert shape(made) == shape(recorded("sglang", "tokenize text"))


async def test_vllms_tokenize() -> None:
    async with client() as worker:
        _, made = await worker.post("/tokenize", {"prompt": "text"})
        assert shape(made) == shape(recorded("vllm", "tokenize text"))


@pytest.mark.parametrize(("path", "step"), [("/server_info", "GET /server_info"), ("/v1/loads", "GET /v1/loads, idle")])
async def test_sglangs_pages_have_no_field_that_the_real_ones_lack(path: str, step: str) -> None:
    async with client(flavour="sglang") as worker:
        made, real = await worker.get(path), recorded("sglang", step)
        apart = {f"disaggregation_{name}" for name in ("mode", "bootstrap_port", "transfer_backend")}
        assert set(made) - {"tokenizer_path", *apart} <= set(real)
        inner, real_inner = (page.get("kv_events") or page["loads"][0] for page in (made, real))
        assert set(inner) <= set(real_inner)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_metrics_are_named_as_the_real_ones(flavour: str) -> None:
    async with client(flavour=flavour) as worker:
        await worker.complete(**TEXT)
        made = {line.split("{")[0] for line in (await metrics(worker)) if not line.startswith("#")}
        real = {line.split("{")[0] for line in answer(NAMES[flavour], "metrics, after").body.decode().splitlines()}
        extra = {"vllm:time_to_first_token_seconds_bucket", "sglang:num_aborted_requests_total"}
        extra.add("vllm:prompt_tokens_by_source_total")
        assert made - extra <= real
        assert len(made) > 8


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_metrics_are_in_prometheus_text_format(flavour: str) -> None:
    """Each type stands before its metric, under the same name; a counter's ends with _total."""
    async with client(flavour=flavour) as worker, worker.session.get(worker.url + "/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = (await response.text()).splitlines()
        typed = [(line.split()[2:], after) for line, after in pairwise(lines) if line.startswith("# TYPE ")]
        assert all(after.startswith(name + "{") for (name, _), after in typed)
        assert {kind for (name, kind), _ in typed if name.endswith("_total")} == {"counter"}


async def metrics(worker: Client) -> list[str]:
    text: str = await worker.get("/metrics")
    return text.splitlines()
