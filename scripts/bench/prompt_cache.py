"""A fake worker's KV cache: real token ids in blocks, evicted when full, every change published over ZMQ as vLLM does.

The simulated engine's cache and sockets, without its timing: what the router is told is what an engine would tell.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engines.sim.cache import CacheEvent, PrefixCache, Stored
from engines.sim.event_publisher import EventPublisher, bind_publishers
from indexer.hashing import chain_hashes, pack_tokens
from indexer.types import PLAIN
from router.tokens import PromptTokens, load_tokenizer

BLOCK_SIZE = 16
BLOCKS = 16_384
"""Of each worker: 262,144 tokens."""

_encode = msgspec.msgpack.Encoder().encode


class PromptCache:
    def __init__(self, tokens: PromptTokens, publisher: EventPublisher, source: dict[str, Any]) -> None:
        self.source = source
        """As /kv_event_sources says it."""
        self._tokens = tokens
        self._publisher = publisher
        self._cache = PrefixCache(BLOCKS)

    def ids(self, body: bytes) -> list[int]:
        fields: dict[str, Any] = msgspec.json.decode(body)
        return self._tokens.ids("chat" if "messages" in fields else "completions", fields)

    def prefill(self, body: bytes) -> None:
        """The prompt's full blocks are cached from now on; generated tokens are not."""
        ids = self.ids(body)
        hashes = chain_hashes(pack_tokens(ids), BLOCK_SIZE, 0).tolist()
        held = self._cache.find(hashes)
        self._cache.acquire(held)
        new = hashes[len(held) :]
        blocks = self._cache.allocate(len(new))
        if blocks:
            tokens = ids[len(held) * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]
            self._cache.store(blocks, new, hashes[len(held) - 1] if held else None, tokens, PLAIN)
        self._cache.release([*held, *(blocks or [])])
        if events := self._cache.take_events():
            self._publisher.publish(encode_events(events))


def encode_events(events: list[CacheEvent]) -> bytes:
    """One vLLM batch; as vLLM does, blocks are removed one by one."""
    encoded: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Stored):
            encoded.append(_stored(event))
        else:
            removed = getattr(event, "hashes", ())
            encoded += [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in removed]
    return _encode([time.time(), encoded, 0])


def _stored(event: Stored) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def prompt_caches(count: int, model: Path) -> list[PromptCache]:
    """One for each worker, on ports of their own."""
    tokens = PromptTokens(load_tokenizer(model), "vllm")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    publishers, first, first_replay = bind_publishers(context, "127.0.0.1", 0, count, "")
    return [
        PromptCache(tokens, publisher, _source(first + index, first_replay + index))
        for index, publisher in enumerate(publishers)
    ]


def _source(port: int, replay: int) -> dict[str, Any]:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    return {**config, "endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
