"""SGLang's load: `/v1/loads`; before it there was `/get_load`; metrics need `--enable-metrics` and come last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engines.answers import items, mapping, share, whole
from engines.description import EngineDescription
from engines.prometheus import Sample, read_samples
from engines.rank_load import RankLoad

_METRICS = {
    "sglang:num_running_reqs": "num_running_reqs",
    "sglang:num_queue_reqs": "num_waiting_reqs",
    "sglang:token_usage": "token_usage",
    "sglang:cache_hit_rate": "cache_hit_rate",
    "sglang:num_used_tokens": "num_used_tokens",
    "sglang:max_total_num_tokens": "max_total_num_tokens",
}
"""Metrics and what /v1/loads calls the same."""


def read_loads(answer: object, description: EngineDescription) -> dict[int, RankLoad]:
    """GET /v1/loads, as a JSON value."""
    return {rank: _rank_load(entry, description) for rank, entry in _ranks(mapping(answer).get("loads"))}


def read_get_load(answer: object, description: EngineDescription) -> dict[int, RankLoad]:
    """GET /get_load, as a JSON value. Its `num_reqs` counts waiting requests too, its `num_tokens` theirs as well."""
    return {rank: _rank_load(_as_in_loads(entry), description) for rank, entry in _ranks(answer)}


def read_metrics(exposition: bytes, description: EngineDescription) -> dict[int, RankLoad]:
    """GET /metrics; several tensor-parallel ranks state the same figures."""
    figures: dict[int, dict[str, int | float]] = {}
    for sample in read_samples(exposition, _METRICS):
        rank = sample.labels.get("dp_rank", "0")
        if rank.isascii() and rank.isdigit() and len(rank) <= 9 and _is_total(sample):
            value = int(sample.value) if sample.value.is_integer() else sample.value
            figures.setdefault(int(rank), {})[_METRICS[sample.name]] = value
    return {rank: _rank_load(known, description) for rank, known in figures.items()}


def _is_total(sample: Sample) -> bool:
    """With priority scheduling there is a series for each priority beside the total, whose label is empty."""
    return not sample.labels.get("priority")


def _ranks(entries: object) -> Iterator[tuple[int, dict[str, Any]]]:
    for entry in map(mapping, items(entries)):
        rank = whole(entry.get("dp_rank", 0))
        if entry and rank is not None:
            yield rank, entry


def _as_in_loads(entry: dict[str, Any]) -> dict[str, Any]:
    requests, waiting = whole(entry.get("num_reqs")), whole(entry.get("num_waiting_reqs"))
    tokens, pending = whole(entry.get("num_tokens")), whole(entry.get("num_pending_tokens"))
    return {
        "num_waiting_reqs": waiting,
        "num_running_reqs": None if requests is None or waiting is None else requests - waiting,
        "num_used_tokens": None if tokens is None or pending is None else tokens - pending,
    }


def _rank_load(entry: dict[str, Any], description: EngineDescription) -> RankLoad:
    """`entry` as in /v1/loads. Tokens become blocks, a partial block counting as one."""
    used, total = whole(entry.get("num_used_tokens")), whole(entry.get("max_total_num_tokens"), 1)
    block_size = description.block_size
    return RankLoad(
        num_requests_waiting=whole(entry.get("num_waiting_reqs")),
        gpu_cache_usage_perc=share(entry.get("token_usage")),
        gpu_prefix_cache_hit_rate=share(entry.get("cache_hit_rate")),
        request_active_slots=whole(entry.get("num_running_reqs")),
        request_total_slots=whole(entry.get("max_running_requests"), 1) or description.max_running,
        kv_active_blocks=None if used is None or block_size is None else -(-used // block_size),
        kv_total_blocks=description.total_blocks if total is None or block_size is None else total // block_size,
        lora_total_slots=description.max_loras,
    )
