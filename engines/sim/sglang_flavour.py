"""Shapes of SGLang 0.5.23 with `--enable-metrics --enable-cache-report`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import msgspec

from engines.sim.cache import CacheEvent, Removed, Stored
from engines.sim.flavour import (
    ERROR_TYPES,
    HASH_MASK,
    MARK,
    ChoiceResult,
    ChunkTemplate,
    Flavour,
    Heading,
    Json,
    Reading,
    chunk_fields,
    rank_metrics,
    split_at_text,
    token_counts,
)
from engines.sim.generation import Refused
from engines.sim.scheduler import Scheduler
from indexer.types import SequenceHash

VERSION = "0.5.23"
BOOTSTRAP_PORT = 8998
"""SGLang's default; a worker that is no prefill worker has nobody listening there."""

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)

_pack = msgspec.msgpack.Encoder().encode


def _capacity(rank: Scheduler) -> int:
    return rank.cache.capacity * rank.block_size


def _used(rank: Scheduler) -> int:
    return _capacity(rank) - rank.cache.free_blocks * rank.block_size


def _hit_rate(rank: Scheduler) -> float:
    return rank.counters.prefix_hits / max(1, rank.counters.prefix_queries)


GAUGES: dict[str, Reading] = {
    "sglang:max_total_num_tokens": _capacity,
    "sglang:num_running_reqs": lambda rank: len(rank.running),
    "sglang:num_queue_reqs": lambda rank: len(rank.waiting) + len(rank.loading),
    "sglang:cache_hit_rate": _hit_rate,
    "sglang:token_usage": lambda rank: rank.cache.usage,
    "sglang:num_used_tokens": _used,
}
COUNTERS: dict[str, Reading] = {
    "sglang:prompt_tokens_total": lambda rank: rank.counters.prompt_tokens,
    "sglang:generation_tokens_total": lambda rank: rank.counters.generated_tokens,
    "sglang:num_requests_total": lambda rank: rank.counters.finished_requests,
    "sglang:cached_tokens_total": lambda rank: rank.counters.prefix_hits,
    "sglang:num_aborted_requests_total": lambda rank: rank.counters.aborted_requests,
}


class SglangFlavour(Flavour):
    decode_blocks_at_finish = True
    clears_at_once = True
    clears_at_start = True
    head_at_once = False
    tokenize_paths = ("/v1/tokenize", "/tokenize")
    owner = "sglang"
    reset_path = "/flush_cache"
    reset_methods = ("POST", "GET")

    def encode_events(self, timestamp: float, events: Sequence[CacheEvent], dp_rank: int) -> bytes:
        return _pack([timestamp, [self._event(event) for event in events], dp_rank])

    def _event(self, event: CacheEvent) -> Json:
        if isinstance(event, Removed):
            return {"type": "BlockRemoved", "block_hashes": _engine_hashes(event.hashes), "medium": "GPU"}
        if not isinstance(event, Stored):
            return {"type": "AllBlocksCleared"}
        fields: Json = {
            "type": "BlockStored",
            "block_hashes": _engine_hashes(event.hashes),
            "parent_block_hash": None if event.parent is None else _engine_hashes([event.parent])[0],
            "token_ids": event.tokens,
            "block_size": self.facts.settings.block_size,
            "lora_id": None,
            "medium": "GPU",
        }
        lora, salt = event.namespace
        return fields | ({} if salt is None else {"cache_salt": salt}) | ({} if lora is None else {"lora_name": lora})

    def answer_id(self, chat: bool, request_id: str) -> str:  # noqa: ARG002 - the same for both here
        return request_id

    def chunk_template(self, heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
        return (_chat_template if heading.chat else _text_template)(heading, choice, finish_reason)

    def usage(self, prompt: int, generated: int, cached: int, heading: Heading, streamed: bool) -> Json:
        usage = {
            **token_counts(prompt, generated),
            "prompt_tokens_details": {"cached_tokens": cached},
            "reasoning_tokens": 0,
        }
        return usage if streamed and not heading.chat else {**usage, "completion_tokens_details": None}

    def usage_chunk(self, heading: Heading, usage: Json) -> Json:
        return {**chunk_fields(heading), "choices": [], "usage": usage}

    def answer(self, heading: Heading, choices: Sequence[ChoiceResult], usage: Json) -> Json:
        generated = choices[0].request.generated
        return {
            "id": heading.answer_id,
            "object": "chat.completion" if heading.chat else "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [_choice(heading, index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
            "metadata": {
                "weight_version": "default",
                "weight_versions": [{"version": "default", "start": 0, "end": generated}],
            },
        }

    def error(self, refused: Refused) -> Json:
        kind = ERROR_TYPES.get(refused.status, "InternalServerError")
        return {"object": "error", "message": refused.message, "type": kind, "param": None, "code": refused.status}

    def streamed_error(self, refused: Refused) -> Json:
        return {"error": {**self.error(refused), "type": HTTPStatus(refused.status).name}}

    def tokenized(self, tokens: list[int] | list[list[int]]) -> Json:
        count = [len(each) for each in tokens if isinstance(each, list)] or len(tokens)
        return {"tokens": tokens, "count": count, "max_model_len": self.facts.settings.context_length}

    def cleared(self, done: bool) -> Json | str:
        return FLUSHED if done else "Flush cache failed.\n"

    def metrics(self) -> str:
        ranks = self.facts.ranks
        labels = [
            f'dp_rank="{number}",engine_type="unified",model_name="{self.facts.settings.model}",pp_rank="0",tp_rank="0"'
            for number in range(len(ranks))
        ]
        return "\n".join(rank_metrics(GAUGES, COUNTERS, labels, ranks)) + "\n"

    def pages(self, in_flight: int, now: float) -> dict[str, Json]:  # noqa: ARG002 - SGLang does not count them
        info = self._server_info()
        return {
            "/server_info": info,
            "/get_server_info": info,
            "/model_info": self._model_info(),
            "/get_model_info": self._model_info(),
            "/v1/loads": self._loads(now),
        }

    def _model_info(self) -> Json:
        settings = self.facts.settings
        path = settings.tokenizer or settings.model
        return {
            "model_path": path,
            "served_model_name": settings.model,
            "tokenizer_path": path,
            "is_generation": True,
            "weight_version": "default",
            "disaggregation_mode": self._mode(),
        }

    def _mode(self) -> str:
        role = self.facts.place.role
        return "null" if role == "both" else role

    def _server_info(self) -> Json:
        settings, rank = self.facts.settings, self.facts.ranks[0]
        path = settings.tokenizer or settings.model
        loras = {"enable_lora": True, "max_loras_per_batch": settings.max_loras or len(settings.loras)}
        return {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": settings.model,
            "context_length": settings.context_length,
            "page_size": settings.block_size,
            "max_total_num_tokens": _capacity(rank),
            "max_total_tokens": _capacity(rank),
            "max_running_requests": settings.max_num_seqs,
            "kv_events": self._kv_events(),
            "dp_size": settings.dp_size,
            "tp_size": 1,
            "version": VERSION,
            "status": "ready",
            "radix_eviction_policy": "lru",
            "schedule_policy": "fcfs",
            "disable_radix_cache": False,
            "chunked_prefill_size": settings.max_num_batched_tokens,
            "enable_cache_report": True,
            "disaggregation_mode": self._mode(),
            "disaggregation_bootstrap_port": self.facts.place.bootstrap_port or BOOTSTRAP_PORT,
            "disaggregation_transfer_backend": "mooncake",
            "internal_states": [{"effective_max_running_requests_per_dp": settings.max_num_seqs}],
            **(loras if settings.loras else {}),
        }

    def _kv_events(self) -> Json | None:
        settings = self.facts.settings
        if not self.facts.event_port:
            return None
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.facts.event_port,
            "topic": self.facts.topic,
            "block_size": settings.block_size,
            "dp_size": settings.dp_size,
            "replay_endpoint_port_base": self.facts.replay_port,
        }

    def _loads(self, now: float) -> Json:
        return {
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [self._rank_load(number, rank, now) for number, rank in enumerate(self.facts.ranks)],
        }

    def _rank_load(self, number: int, rank: Scheduler, now: float) -> Json:
        used = _used(rank)
        waiting = sum(len(request.tokens) for request in rank.waiting)
        return {
            "timestamp": now,
            "dp_rank": number,
            "num_running_reqs": len(rank.running),
            "num_waiting_reqs": len(rank.waiting),
            "num_waiting_uncached_tokens": rank.waiting_uncached_tokens(),
            "num_used_tokens": used,
            "num_total_tokens": used + waiting,
            "num_active_tokens": used + waiting,
            "max_total_num_tokens": _capacity(rank),
            "max_running_requests": rank.max_num_seqs,
            "token_usage": round(rank.cache.usage, 4),
            "cache_hit_rate": _hit_rate(rank),
            "total_prefill_uncached_tokens": rank.counters.prefill_tokens,
            "total_prefill_busy_us": int(rank.counters.busy_seconds * 1e6),
            "queues": {"waiting": len(rank.waiting), "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
        }


def _engine_hashes(hashes: Sequence[SequenceHash]) -> list[int]:
    """Signed 64 bit."""
    return [((name ^ HASH_MASK) + 2**63) % 2**64 - 2**63 for name in hashes]


def _ending(reason: str | None) -> Json:
    return {"logprobs": None, "finish_reason": reason, "matched_stop": None}


def _text_template(heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
    def chunk(reason: str | None) -> Json:
        return {**chunk_fields(heading), "choices": [{"index": choice, "text": MARK, **_ending(reason)}]}

    head, tail = split_at_text(chunk(None))
    _, last_tail = split_at_text(chunk(finish_reason))
    return ChunkTemplate(b"", head, tail, last_tail, b"", b',"usage":null}')


def _chat_template(heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
    def chunk(delta: dict[str, Any], reason: str | None) -> Json:
        fields = {"index": choice, "delta": {"reasoning_content": None, **delta}, **_ending(reason)}
        return {**chunk_fields(heading), "choices": [fields]}

    head, tail = split_at_text(chunk({"content": MARK}, None))
    opening = msgspec.json.encode(chunk({"role": "assistant", "content": ""}, None))
    return ChunkTemplate(opening, head, tail, tail, msgspec.json.encode(chunk({}, finish_reason)), b"}")


def _choice(heading: Heading, index: int, choice: ChoiceResult) -> Json:
    if heading.chat:
        message = {"role": "assistant", "content": choice.text, "reasoning_content": None}
        return {"index": index, "message": message, **_ending(choice.finish_reason)}
    return {"index": index, "text": choice.text, **_ending(choice.finish_reason)}
