"""The load of one rank, as its engine states it."""

from __future__ import annotations

import msgspec

from indexer.events import Count


class RankLoad(msgspec.Struct, frozen=True):
    """None for what the engine does not state; names and units as in `indexer.events.LoadReport`."""

    num_requests_waiting: Count | None = None
    gpu_cache_usage_perc: float | None = None
    """0–1."""
    gpu_prefix_cache_hit_rate: float | None = None
    """0–1; vLLM's since it started, SGLang's over its latest prefills."""
    request_active_slots: Count | None = None
    request_total_slots: Count | None = None
    kv_active_blocks: Count | None = None
    kv_total_blocks: Count | None = None
    lora_total_slots: Count | None = None
