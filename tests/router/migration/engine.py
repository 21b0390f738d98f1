"""An engine as vLLM streams: tokens are pieces of UTF-8, and text waits for the rest of its character."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.tokens import Endpoint

Json = dict[str, Any]
PIECES = [*(letter.encode() for letter in 'ab "\\\n'), *(bytes([byte]) for byte in "é日🙂".encode())]
"""By token."""
TEXTS = [[0], [1], [2], [3], [4], [5], [6, 7], [8, 9, 10], [11, 12, 13, 14]]
"""Tokens that are whole characters together."""
Usage = Literal["none", "final", "continuous"]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode()


def ends_whole(tokens: Sequence[int]) -> bool:
    """Whether the last character of `tokens` is whole, as a tokenizer tells it."""
    return not b"".join(PIECES[token] for token in tokens).decode(errors="replace").endswith("\ufffd")


@dataclass
class Engine:
    """Answers `answer` to `prompt`, and the rest of it to the prompt and its beginning."""

    prompt: list[int]
    answer: list[int]
    groups: list[int]
    """Tokens that come in one event, over and over."""
    name: str = "first"
    parses: bool = False
    """Looks for tool calls in chats: what has no text has no event, unless its tokens are asked for."""

    def stream(self, endpoint: Endpoint, body: Json) -> Iterator[bytes]:
        """Whole events."""
        assert body["stream"] is True
        prompt = self.prompt if endpoint == "chat" else body["prompt"]
        said = prompt[len(self.prompt) :]
        assert prompt == self.prompt + self.answer[: len(said)]
        tokens = self.answer[len(said) :][: body["max_tokens"]]
        yield from _Stream(self, endpoint, body, prompt, tokens).events()


class _Stream:
    def __init__(self, engine: Engine, endpoint: Endpoint, body: Json, prompt: list[int], tokens: list[int]) -> None:
        self.engine, self.prompt, self.tokens = engine, prompt, tokens
        self.chat = endpoint == "chat"
        options = body.get("stream_options") or {}
        self.final = bool(options.get("include_usage"))
        self.continuous = bool(options.get("continuous_usage_stats"))
        self.tells = body.get("return_token_ids") is True
        self.made = 0

    def events(self) -> Iterator[bytes]:
        if self.chat:
            ids = self.prompt if self.tells else None
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.event([choice], prompt_token_ids=ids, prompt_text=None)
        yield from self.tokens_of_it()
        if self.final:
            usage = self.usage() | {"prompt_tokens_details": {"cached_tokens": len(self.prompt) - 1}}
            yield self.event([], usage=usage, system_fingerprint="f")
        yield b"data: [DONE]\n\n"

    def tokens_of_it(self) -> Iterator[bytes]:
        waiting, groups = b"", 0
        while self.made < len(self.tokens):
            size = self.engine.groups[groups % len(self.engine.groups)]
            ids = self.tokens[self.made : self.made + size]
            groups, self.made = groups + 1, self.made + len(ids)
            waiting += b"".join(PIECES[token] for token in ids)
            text = waiting.decode(errors="ignore")  # what waits is one broken character, at the end
            waiting = waiting[len(text.encode()) :]
            choice = self.choice(text, ids)
            if self.chat and self.engine.parses and not text:
                choice["delta"] = {}
                if choice["finish_reason"] is None and not self.tells:
                    continue
            yield self.event([choice])

    def choice(self, text: str, ids: list[int]) -> Json:
        reason = "length" if self.made == len(self.tokens) else None
        told = {"token_ids": ids if self.tells else None}
        if self.chat:
            stop = {"stop_reason": None} if reason else {}
            return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason, **stop, **told}
        prompt = self.prompt if self.tells and self.made == len(ids) else None
        fields: Json = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {**fields, "prompt_token_ids": prompt, **told}

    def usage(self) -> Json:
        count = len(self.prompt)
        return {"prompt_tokens": count, "total_tokens": count + self.made, "completion_tokens": self.made}

    def event(self, choices: list[Json], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        name = self.engine.name
        if self.continuous and choices:
            more = {"usage": self.usage(), **more}
        fields = {"id": name, "object": kind, "created": len(name), "model": "m", "choices": choices, **more}
        return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
