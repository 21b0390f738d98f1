"""The load side of the vLLM plug-in (entry-point group `vllm.stat_logger_plugins`); only vLLM imports this module.

It runs in vLLM's front end, the events in its engine core: figures go to the latter over NATS, whose load reports then
carry them. Does nothing until KV_ROUTER_NATS is set.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from engines.rank_load import RankLoad
from engines.vllm.load import active_blocks
from publishers.in_process import FiguresThread
from publishers.plugin_settings import settings_from

logger = logging.getLogger(__name__)

UNREADABLE = "The engine's load cannot be read from inside vLLM; this is said once"


class KVRouterStatLogger(StatLoggerBase):  # type: ignore[misc] # Any: vLLM is not installed where types are checked
    """One engine core's figures; `record` is called on every output and only remembers."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = settings_from(os.environ)
        self._thread = None if settings is None else FiguresThread(settings, settings.rank(engine_index))
        self._config = vllm_config
        self._queries = 0
        self._hits = 0
        self._told = False

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if self._thread is None or scheduler_stats is None:
            return
        try:
            self._thread.update(self._figures(scheduler_stats))
        except Exception:
            # Of objects that another project may change at any time; vLLM answers no request any more once this raises.
            if not self._told:
                self._told = True
                logger.exception(UNREADABLE)

    def log_engine_initialized(self) -> None:
        pass

    def _figures(self, stats: Any) -> RankLoad:
        self._queries += stats.prefix_cache_stats.queries
        self._hits += stats.prefix_cache_stats.hits
        total = self._blocks()
        return RankLoad(
            num_requests_waiting=stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0),
            gpu_cache_usage_perc=stats.kv_cache_usage,
            gpu_prefix_cache_hit_rate=self._hits / self._queries if self._queries else None,
            request_active_slots=stats.num_running_reqs,
            request_total_slots=self._config.scheduler_config.max_num_seqs,
            kv_active_blocks=active_blocks(stats.kv_cache_usage, total) if total else None,
            kv_total_blocks=total,
            lora_total_slots=getattr(getattr(self._config, "lora_config", None), "max_loras", None),
        )

    def _blocks(self) -> int | None:
        """Of one rank: in a front end the configuration has the sum over its ranks (0.33: v1/engine/core_client.py)."""
        together, parallel = self._config.cache_config.num_gpu_blocks, self._config.parallel_config
        only_local = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
        ranks = parallel.data_parallel_size_local if only_local else parallel.data_parallel_size
        return together // ranks if together else None
