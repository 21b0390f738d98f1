"""What vLLM is, by its answers."""

from __future__ import annotations

from typing import Any

from engines import problems
from engines.answers import mapping, text
from engines.description import MOST_RANKS, EngineDescription, EventSource, Model, bases
from engines.endpoints import reachable
from engines.prometheus import Sample, read_samples
from engines.versions import Version, is_before
from indexer.events import LARGEST_COUNT

CONFIG = "vllm:cache_config_info"
RUNNING = "vllm:num_requests_running"

_RUST = "rust_frontend_version"
"""In GET /version of vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND), which takes requests for its ranks by their
numbers among all (vllm-project/router#210); the one in Python counts its own from 0."""

_TAKES_RANK: Version = (0, 11, 1)
"""The first version that reads X-data-parallel-rank (entrypoints/openai/serving_engine.py)."""


def describe(
    host: str, models: tuple[Model, ...], version: object, sources: object, metrics: bytes
) -> EngineDescription:
    """From GET /version, /kv_event_sources (None: it has none) and /metrics, the first two as JSON values."""
    config = read_samples(metrics, {CONFIG})
    # The front end in Rust has no CONFIG.
    ranks = {sample.labels.get("engine", "0") for sample in config or read_samples(metrics, {RUNNING})}
    configs = _configs(sources)
    first_rank = min([*configs, *(int(rank) for rank in ranks if is_rank(rank))], default=0)
    event_sources, found = _event_sources(host, sources, first_rank)
    block_size = _number(config, "block_size")
    if block_size is None:
        found = (*found, problems.NO_BLOCK_SIZE)
    release, dp_size = text(mapping(version).get("version")), min(max(1, len(event_sources), len(ranks)), MOST_RANKS)
    if dp_size > 1 and is_before(release, _TAKES_RANK):
        found = (*found, problems.OWN_RANK)
    return EngineDescription(
        kind="vllm",
        version=release,
        models=models,
        block_size=block_size,
        dp_size=dp_size,
        first_rank=first_rank,
        asked_from=first_rank if _RUST in mapping(version) else 0,
        event_sources=event_sources,
        total_blocks=blocks_of_each(config),
        keeps_prefixes=all(sample.labels.get("enable_prefix_caching") != "False" for sample in config),
        kv_dtype=next((sample.labels["cache_dtype"] for sample in config if sample.labels.get("cache_dtype")), None),
        # Counters of NIXL are there from the start (0.32). Whether it pulls or pushes they do not tell; the prefill's
        # answer does, and as long as the two parts are sent one after the other both take it.
        connector="nixl" if b"\nvllm:nixl_" in metrics else None,
        tokenizer_path=next((model.root for model in bases(models)), None),
        problems=found,
    )


def blocks_of_each(config: list[Sample]) -> int | None:
    """KV blocks of one rank, from the samples of CONFIG. Each states what all ranks of the server have together: its
    front end adds up what they report (0.9: v1/engine/utils.py, 0.33: v1/engine/core_client.py)."""
    together = _number(config, "num_gpu_blocks")
    return None if together is None else max(1, together // len({sample.labels.get("engine") for sample in config}))


def _number(config: list[Sample], label: str) -> int | None:
    """The smallest over the ranks; a label that is not known yet reads "None"."""
    stated = (sample.labels.get(label, "") for sample in config)
    return min((int(number) for number in stated if is_number(number)), default=None)


def is_number(label: str) -> bool:
    """A positive integer as a label's text; the length keeps absurd ones from being converted."""
    return label.isascii() and label.isdigit() and len(label) <= 18 and 0 < int(label) <= LARGEST_COUNT


def is_rank(label: str) -> bool:
    """As `is_number`, or 0."""
    return label == "0" or is_number(label)


def _configs(sources: object) -> dict[int, dict[str, Any]]:
    """By the engine's number of each rank, in order."""
    configs = {int(rank): mapping(config) for rank, config in mapping(sources).items() if is_rank(rank)}
    return dict(sorted(configs.items())[:MOST_RANKS])


def _event_sources(host: str, sources: object, first_rank: int) -> tuple[tuple[EventSource, ...], tuple[str, ...]]:
    if not isinstance(sources, dict):
        return (), (problems.NO_EVENT_SOURCES,)
    published = {rank - first_rank: config for rank, config in _configs(sources).items() if _publishes(config)}
    if not published:
        return (), (problems.EVENTS_OFF,)
    found = [source for rank, config in published.items() if (source := _event_source(host, rank, config)) is not None]
    sentences = [problems.BAD_ENDPOINT] if len(found) < len(published) else []
    if any(source.replay is None for source in found):
        sentences.append(problems.NO_REPLAY)
    return tuple(found), tuple(sentences)


def _publishes(config: dict[str, Any]) -> bool:
    return config.get("enable_kv_cache_events") is True and config.get("publisher") == "zmq"


def _event_source(host: str, rank: int, config: dict[str, Any]) -> EventSource | None:
    """Each rank states its own endpoints, ports already counted up."""
    endpoint = reachable(text(config.get("endpoint")), host)
    if endpoint is None:
        return None
    replay = reachable(text(config.get("replay_endpoint")), host)
    return EventSource(rank, endpoint, replay, text(config.get("topic")) or "")
