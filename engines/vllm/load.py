"""vLLM's load: its Prometheus metrics, where the label `engine` is the data-parallel rank."""

from __future__ import annotations

import re

from engines.answers import share, whole
from engines.description import EngineDescription
from engines.prometheus import read_samples
from engines.rank_load import RankLoad
from engines.vllm.describe import CONFIG, RUNNING, blocks_of_each, is_rank

WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
_MAX_LORAS = re.compile(rb'\nvllm:lora_requests_info\{.*?\bmax_lora="(\d{1,9})"')
"""There from the first requests on: a line for each set of adapters that ever ran together, of which one is enough."""
_NAMES = frozenset({RUNNING, WAITING, USAGE, QUERIES, HITS})


def read(exposition: bytes, description: EngineDescription) -> dict[int, RankLoad]:
    """By rank; the description supplies what the metrics leave out."""
    samples, loras = read_samples(exposition, _NAMES | {CONFIG}), _MAX_LORAS.search(exposition)
    total_blocks = blocks_of_each([sample for sample in samples if sample.name == CONFIG]) or description.total_blocks
    figures: dict[int, dict[str, float]] = {}
    for sample in samples:
        engine = sample.labels.get("engine", "0")  # versions before data parallelism had no such label
        if sample.name != CONFIG and is_rank(engine) and int(engine) >= description.first_rank:
            figures.setdefault(int(engine) - description.first_rank, {})[sample.name] = sample.value
    max_loras = int(loras[1]) if loras else None
    return {
        rank: _rank_load(known, total_blocks, description.max_running, max_loras) for rank, known in figures.items()
    }


def _rank_load(
    known: dict[str, float], total_blocks: int | None, max_running: int | None, max_loras: int | None
) -> RankLoad:
    usage = share(known.get(USAGE))
    return RankLoad(
        num_requests_waiting=_count(known.get(WAITING)),
        gpu_cache_usage_perc=usage,
        gpu_prefix_cache_hit_rate=_hit_rate(known.get(QUERIES), known.get(HITS)),
        request_active_slots=_count(known.get(RUNNING)),
        request_total_slots=max_running,
        kv_active_blocks=None if usage is None or total_blocks is None else active_blocks(usage, total_blocks),
        kv_total_blocks=total_blocks,
        lora_total_slots=max_loras,
    )


def _count(value: float | None) -> int | None:
    return None if value is None else whole(int(value))


def _hit_rate(queries: float | None, hits: float | None) -> float | None:
    """Both in tokens."""
    if not queries or hits is None or not 0 <= hits <= queries:
        return None
    return hits / queries


def active_blocks(usage: float, total_blocks: int) -> int:
    """One block is vLLM's null block, never used and not part of its usage (BlockPool.get_usage)."""
    return round(usage * (total_blocks - 1))
