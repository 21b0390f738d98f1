"""How to find out what a worker is, as a dialogue without I/O: yields paths to GET, is sent what came back.

A shell drives it with its own HTTP client:

    steps = probe(host="10.0.0.7")
    path = next(steps)
    while True:
        try:
            path = steps.send(await fetch(path))
        except StopIteration as done:
            return done.value
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import msgspec

import engines.sglang.describe
import engines.vllm.describe
from engines import problems
from engines.answers import items, mapping, read_json, text, whole
from engines.description import EngineDescription, EngineKind, Model


class Answer(NamedTuple):
    """An HTTP answer; status 0 (or below) when there was none."""

    status: int
    body: bytes = b""


Probe = Generator[str, Answer, EngineDescription]


def probe(host: str) -> Probe:
    """`host` is the worker URL's, put where an engine says that it listens on all interfaces.

    Four requests for an engine that answers in its usual way, one for a worker that does not answer at all.
    """
    listing = yield "/v1/models"
    if listing.status <= 0:
        return EngineDescription("unknown", problems=(problems.NO_ANSWER,))
    entries = _entries(listing)
    models = _models(entries)
    kind = _owner(entries) or (yield from _guess())
    locked = listing.status in {401, 403}
    if kind == "unknown":
        problem = problems.WANTS_KEY if locked else problems.NOT_AN_ENGINE
        return EngineDescription(kind, models=models, problems=(problem,))
    found = yield from (_vllm if kind == "vllm" else _sglang)(host, models)
    if models:
        return found
    if locked and found.version is None:  # SGLang tells nothing then, which is no problem of its own
        return msgspec.structs.replace(found, problems=(problems.WANTS_KEY,))
    problem = problems.WANTS_KEY if locked else problems.NO_MODELS
    return msgspec.structs.replace(found, problems=(problem, *found.problems))


def read_models(kind: EngineKind, listing: Answer) -> tuple[Model, ...]:
    """As a description has them, from GET /v1/models; () for what is no list of any."""
    models = _models(_entries(listing)) if listing.status == 200 else ()
    return engines.sglang.describe.with_adapters(models) if kind == "sglang" else models


def _entries(listing: Answer) -> list[dict[str, Any]]:
    return [mapping(entry) for entry in items(mapping(read_json(listing)).get("data"))]


def _models(entries: list[dict[str, Any]]) -> tuple[Model, ...]:
    return tuple(
        Model(name, text(entry.get("root")), whole(entry.get("max_model_len"), 1), text(entry.get("parent")))
        for entry in entries
        if (name := text(entry.get("id"))) is not None
    )


def _owner(entries: list[dict[str, Any]]) -> EngineKind | None:
    owners = {text(entry.get("owned_by")) for entry in entries}
    return "vllm" if "vllm" in owners else "sglang" if "sglang" in owners else None


def _guess() -> Generator[str, Answer, EngineKind]:
    """For a model list that is locked or renamed: metrics are named after the engine and need no key."""
    metrics = yield "/metrics"
    for kind in ("vllm", "sglang"):
        if metrics.status == 200 and f"\n{kind}:".encode() in b"\n" + metrics.body:
            return kind
    info = yield from _server_info()
    return "sglang" if "page_size" in mapping(info) else "unknown"


def _vllm(host: str, models: tuple[Model, ...]) -> Probe:
    version = read_json((yield "/version"))
    sources = read_json((yield "/kv_event_sources"))
    metrics = yield "/metrics"
    return engines.vllm.describe.describe(
        host, models, version, sources, metrics.body if metrics.status == 200 else b""
    )


def _sglang(host: str, models: tuple[Model, ...]) -> Probe:
    info = yield from _server_info()
    names_tokenizer = engines.sglang.describe.names_tokenizer(info)
    model_info = None if names_tokenizer else read_json((yield "/model_info"))
    return engines.sglang.describe.describe(host, models, info, model_info)


def _server_info() -> Generator[str, Answer, object]:
    """The second path is the older one."""
    info = read_json((yield "/server_info"))
    return info if isinstance(info, dict) else read_json((yield "/get_server_info"))
