"""A fleet of light fake engines in one process; prints their URLs as one line of JSON.

It answers what each router asks of a vLLM worker, and completions and chats with fixed text: whole, or as a stream of
64 chunks. A worker writes one chunk of each of its streams at every step, as an engine's decode steps do, each chunk in
a write and a packet of its own. With `--events MODEL` prompts are tokenised and cached, and the cache's changes are
published as KV events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import deque
from pathlib import Path
from typing import Any, cast

import uvloop

from .corpus import CONTEXT
from .prompt_cache import BLOCK_SIZE, BLOCKS, PromptCache, prompt_caches
from .workloads import MODEL, STREAM_TOKENS

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAMED = re.compile(rb'"stream" *: *true')
_METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block_size}",engine="0",num_gpu_blocks="{blocks}"}} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} 0.0
"""


def whole(status: bytes, kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def chunk(data: bytes) -> bytes:
    event = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(event), event)


def _answer(chat: bool) -> bytes:
    text = " ".join(["token"] * 16)
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    body = {
        "id": "answer-0",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 16, "total_tokens": 116},
    }
    return whole(b"200 OK", b"application/json", json.dumps(body).encode())


def _chunks(chat: bool) -> list[bytes]:
    """64 tokens, and what ends the stream."""
    content = {"delta": {"content": " token"}} if chat else {"text": " token"}
    event = {
        "id": "answer-0",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": None}],
    }
    return [chunk(json.dumps(event).encode())] * STREAM_TOKENS + [chunk(b"[DONE]") + b"0\r\n\r\n"]


_WHOLE = {chat: _answer(chat) for chat in (False, True)}
_STREAM = {chat: _chunks(chat) for chat in (False, True)}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Worker:
    def __init__(self, root: str, step: float, cache: PromptCache | None) -> None:
        self._step = step
        self._cache = cache
        self._streams: list[tuple[asyncio.Transport, deque[bytes]]] = []
        self._running = False
        self._pages = _pages(root, cache.source if cache else None)

    def answer(self, method: bytes, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if method == b"GET":
            transport.write(self._pages.get(path, self._pages[b"404"]))
        elif path in {b"/v1/completions", b"/v1/chat/completions"}:
            self._generate(path == b"/v1/chat/completions", body, transport)
        elif path == b"/tokenize" and self._cache:
            ids = self._cache.ids(body)
            answer = {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
            transport.write(whole(b"200 OK", b"application/json", json.dumps(answer).encode()))
        else:
            transport.write(self._pages[b"404"])

    def _generate(self, chat: bool, body: bytes, transport: asyncio.Transport) -> None:
        if self._cache:
            self._cache.prefill(body)
        if _STREAMED.search(body):
            self._stream(transport, chat)
        else:
            transport.write(_WHOLE[chat])

    def _stream(self, transport: asyncio.Transport, chat: bool) -> None:
        transport.write(_STREAM_HEAD)
        self._streams.append((transport, deque(_STREAM[chat])))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_later(self._step, self._decode)

    def _decode(self) -> None:
        for transport, left in self._streams:
            transport.write(left.popleft())
        self._streams = [stream for stream in self._streams if stream[1] and not stream[0].is_closing()]
        self._running = bool(self._streams)
        if self._running:
            asyncio.get_running_loop().call_later(self._step, self._decode)


def _pages(root: str, source: dict[str, Any] | None) -> dict[bytes, bytes]:
    """By path; "404" for all others."""
    card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": root, "max_model_len": CONTEXT}
    objects: dict[bytes, object] = {
        b"/v1/models": {"object": "list", "data": [card]},
        b"/version": {"version": "0.32.0"},
        b"/kv_event_sources": {"0": source} if source else {},
        b"/get_model_info": {"model_path": root, "is_generation": True},
        b"/model_info": {"model_path": root, "is_generation": True},
        b"/get_server_info": {"model_path": root, "served_model_name": MODEL},
        b"/server_info": {"model_path": root, "served_model_name": MODEL},
    }
    pages = {path: whole(b"200 OK", b"application/json", json.dumps(page).encode()) for path, page in objects.items()}
    metrics = _METRICS.format(block_size=BLOCK_SIZE, blocks=BLOCKS, model=MODEL).encode()
    pages[b"/metrics"] = whole(b"200 OK", b"text/plain; version=0.0.4", metrics)
    pages[b"/health"] = pages[b"/health_generate"] = whole(b"200 OK", b"text/plain", b"")
    pages[b"404"] = whole(b"404 Not Found", b"application/json", b'{"detail":"Not Found"}')
    return pages


class Serving(asyncio.Protocol):
    """One connection. Requests come with a length, as all the routers send them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while request := take_request(self._buffer):
            self._worker.answer(*request, self._transport)


def take_request(buffer: bytearray) -> tuple[bytes, bytes, bytes] | None:
    """Method, path and body of the first request, taken out of the buffer; None while it is not whole."""
    end = buffer.find(_END_OF_HEAD)
    if end < 0:
        return None
    found = _LENGTH.search(buffer, 0, end)
    start = end + len(_END_OF_HEAD)
    size = start + (int(found[1]) if found else 0)
    if len(buffer) < size:
        return None
    method, path = bytes(buffer[: buffer.index(b" HTTP/")]).split(b" ", 1)
    body = bytes(buffer[start:size])
    del buffer[:size]
    return method, path.partition(b"?")[0], body


async def serve(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    caches = prompt_caches(args.workers, args.events) if args.events else [None] * args.workers
    for cache in caches:
        worker = Worker(str(args.events or "/bench"), args.step_ms / 1000, cache)
        server = await loop.create_server(lambda made=worker: Serving(made), "127.0.0.1", 0, backlog=1024)  # type: ignore[misc]  # mypy cannot infer the lambda's default
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"workers": [f"http://127.0.0.1:{port}" for port in ports]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.fake_worker")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two chunks of a stream")
    parser.add_argument("--events", type=Path, metavar="MODEL", help="publish KV events; folder with tokenizer.json")
    args = parser.parse_args(sys.argv[1:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(args))


if __name__ == "__main__":
    main()
