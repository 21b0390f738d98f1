"""Shapes of `vllm serve` 0.32.0 with `--enable-prompt-tokens-details` and VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from engines.sim.cache import CacheEvent, Removed, Stored
from engines.sim.flavour import (
    BUFFER_STEPS,
    ERROR_TYPES,
    HASH_MASK,
    HIGH_WATER_MARK,
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
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-sim"

_pack = msgspec.msgpack.Encoder().encode

GAUGES: dict[str, Reading] = {
    "vllm:num_requests_running": lambda rank: len(rank.running),
    "vllm:num_requests_waiting": lambda rank: len(rank.waiting) + len(rank.loading),
    "vllm:kv_cache_usage_perc": lambda rank: rank.cache.usage,
}
COUNTERS: dict[str, Reading] = {
    "vllm:prefix_cache_queries_total": lambda rank: rank.counters.prefix_queries,
    "vllm:prefix_cache_hits_total": lambda rank: rank.counters.prefix_hits,
    "vllm:num_preemptions_total": lambda rank: rank.counters.preemptions,
    "vllm:prompt_tokens_total": lambda rank: rank.counters.prompt_tokens,
    "vllm:generation_tokens_total": lambda rank: rank.counters.generated_tokens,
}


class VllmFlavour(Flavour):
    decode_blocks_at_finish = False
    clears_at_once = False
    clears_at_start = False
    head_at_once = True
    reset_path = "/reset_prefix_cache"
    reset_methods = ("POST",)
    tokenize_paths = ("/tokenize",)
    owner = "vllm"

    def encode_events(self, timestamp: float, events: Sequence[CacheEvent], dp_rank: int) -> bytes:
        encoded: list[Json] = []
        for event in events:
            if isinstance(event, Stored):
                encoded.append(self._stored(event))
            elif isinstance(event, Removed):
                # vLLM removes block by block.
                encoded += [
                    {"type": "BlockRemoved", "block_hashes": [name ^ HASH_MASK], "medium": "GPU", "group_idx": 0}
                    for name in event.hashes
                ]
            else:
                encoded.append({"type": "AllBlocksCleared"})
        return _pack([timestamp, encoded, dp_rank])

    def _stored(self, event: Stored) -> Json:
        lora, salt = event.namespace
        every: list[str] = [] if lora is None else [lora]
        first = [*every, salt] if salt is not None and event.parent is None else every
        keys = [every or None] * len(event.hashes)
        keys[0] = first or None
        return {
            "type": "BlockStored",
            "block_hashes": [name ^ HASH_MASK for name in event.hashes],
            "parent_block_hash": None if event.parent is None else event.parent ^ HASH_MASK,
            "token_ids": event.tokens,
            "block_size": self.facts.settings.block_size,
            "lora_id": None if lora is None else 1 + self.facts.settings.loras.index(lora),
            "medium": "GPU",
            "lora_name": lora,
            "extra_keys": keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def answer_id(self, chat: bool, request_id: str) -> str:
        return f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}"

    def chunk_template(self, heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
        return (_chat_template if heading.chat else _text_template)(heading, choice, finish_reason)

    def usage(self, prompt: int, generated: int, cached: int, heading: Heading, streamed: bool) -> Json:
        details: Json = {"cached_tokens": cached}
        if streamed:
            if heading.chat:
                details["created_cache_tokens"] = None
            return {**token_counts(prompt, generated), "prompt_tokens_details": details}
        details |= {"created_cache_tokens": None, "multimodal_tokens": None}
        return {
            **token_counts(prompt, generated),
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }

    def usage_chunk(self, heading: Heading, usage: Json) -> Json:
        return {**chunk_fields(heading), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}

    def answer(self, heading: Heading, choices: Sequence[ChoiceResult], usage: Json) -> Json:
        shape = _chat_choice if heading.chat else _text_choice
        fields: Json = {
            "id": heading.answer_id,
            "object": "chat.completion" if heading.chat else "text_completion",
            "created": heading.created,
            "model": heading.model,
            "choices": [shape(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        if heading.chat:
            request = choices[0].request
            ids = request.tokens[: request.prompt_length] if choices[0].with_token_ids else None
            fields |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        return {**fields, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def error(self, refused: Refused) -> Json:
        kind = ERROR_TYPES.get(refused.status, "InternalServerError")
        return {
            "error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.status},
        }

    def streamed_error(self, refused: Refused) -> Json:
        return self.error(refused)

    def _card(self, name: str, root: str, parent: str | None) -> Json:
        return {**super()._card(name, root, parent), "permission": []}

    def tokenized(self, tokens: list[int] | list[list[int]]) -> Json:
        length = self.facts.settings.context_length
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}

    def cleared(self, done: bool) -> Json | str:
        return {"success": done}

    def metrics(self) -> str:
        ranks = self.facts.ranks
        labels = [f'engine="{number}",model_name="{self.facts.settings.model}"' for number in range(len(ranks))]
        lines = rank_metrics(GAUGES, COUNTERS, labels, ranks)
        for each, rank in zip(labels, ranks, strict=True):
            lines += self._rank_lines(each, rank)
        limit = self.facts.settings.max_loras
        if limit is not None:
            lines.append(f'vllm:lora_requests_info{{max_lora="{limit}",{_adapters(ranks)}}} 1.0')
        return "\n".join(lines) + "\n"

    def _rank_lines(self, labels: str, rank: Scheduler) -> list[str]:
        """Simulated seconds in the TTFT histogram."""
        counters, settings = rank.counters, self.facts.settings
        together = sum(each.cache.capacity for each in self.facts.ranks)  # as vLLM states it of each
        blocks = f'block_size="{settings.block_size}",enable_prefix_caching="True",num_gpu_blocks="{together}"'
        seconds, source = "vllm:time_to_first_token_seconds", "vllm:prompt_tokens_by_source_total"
        return [
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {float(counters.finished_requests)}',
            f'vllm:request_success_total{{{labels},finished_reason="abort"}} {float(counters.aborted_requests)}',
            f'{seconds}_bucket{{{labels},le="+Inf"}} {float(counters.first_tokens)}',
            f"{seconds}_count{{{labels}}} {float(counters.first_tokens)}",
            f"{seconds}_sum{{{labels}}} {counters.first_token_seconds}",
            *(f'{source}{{{labels},source="{name}"}} {float(tokens)}' for name, tokens in _sources(rank).items()),
            f"vllm:cache_config_info{{{labels},{blocks}}} 1.0",
        ]

    def pages(self, in_flight: int, now: float) -> dict[str, Json]:  # noqa: ARG002 - no page here tells the time
        publishing = range(len(self.facts.ranks)) if self.facts.event_port else ()
        return {
            "/version": {"version": VERSION},
            "/load": {"server_load": in_flight},
            "/kv_event_sources": {str(rank): self._source(rank) for rank in publishing},
        }

    def _source(self, rank: int) -> Json:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.facts.event_port + rank}",
            "replay_endpoint": f"tcp://*:{self.facts.replay_port + rank}",
            "buffer_steps": BUFFER_STEPS,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": self.facts.topic,
        }


def _adapters(ranks: Sequence[Scheduler]) -> str:
    """Labels that name the adapters in use."""
    running = _adapters_of(request for rank in ranks for request in rank.running)
    waiting = _adapters_of(request for rank in ranks for request in rank.waiting)
    return f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'


def _adapters_of(requests: Iterable[Request]) -> str:
    return ",".join(sorted({name for each in requests if (name := each.namespace.lora_name) is not None}))


def _sources(rank: Scheduler) -> dict[str, int]:
    """Where the KV of admitted prompts came from, in tokens; of those that are loading only what is here."""
    counters = rank.counters
    to_come = sum(request.prompt_length - request.computed for request in rank.loading.values())
    elsewhere = counters.prefix_hits + counters.transferred_tokens
    return {
        "local_compute": counters.prompt_tokens - elsewhere - to_come,
        "local_cache_hit": counters.prefix_hits,
        "external_kv_transfer": counters.transferred_tokens,
    }


def _text_template(heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
    def chunk(reason: str | None) -> Json:
        fields: Json = {"index": choice, "text": MARK, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {**chunk_fields(heading), "choices": [{**fields, "prompt_token_ids": None, "token_ids": None}]}

    head, tail = split_at_text(chunk(None))
    return ChunkTemplate(b"", head, tail, split_at_text(chunk(finish_reason))[1], b"", b"}")


def _chat_template(heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate:
    def chunk(delta: Json, reason: str | None, **more: Any) -> Json:
        fields = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return {**chunk_fields(heading), "choices": [fields]}

    role = chunk({"role": "assistant", "content": ""}, None)
    head, tail = split_at_text(chunk({"content": MARK}, None, token_ids=None))
    _, last_tail = split_at_text(chunk({"content": MARK}, finish_reason, stop_reason=None, token_ids=None))
    opening = msgspec.json.encode({**role, "prompt_token_ids": None, "prompt_text": None})
    return ChunkTemplate(opening, head, tail, last_tail, b"", b"}")


def _choice_ids(choice: ChoiceResult) -> Json:
    request = choice.request
    return {"token_ids": request.tokens[request.prompt_length :] if choice.with_token_ids else None}


def _text_choice(index: int, choice: ChoiceResult) -> Json:
    prompt = choice.request.tokens[: choice.request.prompt_length] if choice.with_token_ids else None
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        **_choice_ids(choice),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "routed_experts": None,
    }


def _chat_choice(index: int, choice: ChoiceResult) -> Json:
    unused = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, **unused},
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        **_choice_ids(choice),
        "routed_experts": None,
    }
