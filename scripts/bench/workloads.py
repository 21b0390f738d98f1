"""The requests of each load, made as they are sent: no two prompts are alike, unless a conversation grows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MODEL = "bench"
STREAM_TOKENS = 64
_CONVERSATION = range(20_000, 60_000, 2_000)
"""Bytes before each turn: 40 kB in the mean."""

_PASSAGE = 6

Bodies = Iterator[bytes]


class Workload(NamedTuple):
    """`bodies`: one connection's requests, from its randomness and the text to draw from. `least`: bytes of an answer;
    one with fewer was cut short, or is an error that came with a good status."""

    title: str
    path: str
    bodies: Callable[[random.Random, Sequence[str]], Bodies]
    streamed: bool = False
    least: int = 200


def prompt(draw: random.Random, text: Sequence[str], size: int) -> str:
    """`size` characters: passages of a few lines from all over the text."""
    passages: list[str] = []
    length = 0
    while length <= size:  # the last blank does not count
        start = draw.randrange(len(text) - _PASSAGE)
        passages.append(" ".join(text[start : start + _PASSAGE]))
        length += len(passages[-1]) + 1
    return " ".join(passages)[:size]


def _completions(size: int, streamed: bool = False) -> Callable[[random.Random, Sequence[str]], Bodies]:
    def bodies(draw: random.Random, text: Sequence[str]) -> Bodies:
        fields = {"model": MODEL, "max_tokens": STREAM_TOKENS if streamed else 16, "stream": streamed}
        while True:
            yield json.dumps({**fields, "prompt": prompt(draw, text, size)}).encode()

    return bodies


def _conversations(draw: random.Random, text: Sequence[str]) -> Bodies:
    """Each turn repeats all before it and adds an answer and a question, 2 kB together."""
    while True:
        messages = [{"role": "user", "content": prompt(draw, text, _CONVERSATION.start)}]
        for _ in _CONVERSATION:
            yield json.dumps({"model": MODEL, "max_tokens": 16, "messages": messages}).encode()
            messages.append({"role": "assistant", "content": prompt(draw, text, 1_000)})
            messages.append({"role": "user", "content": prompt(draw, text, 1_000)})


WORKLOADS = {
    "short": Workload("400 B prompts", "/v1/completions", _completions(400)),
    "long": Workload("40 kB prompts, varied", "/v1/completions", _completions(40_000)),
    "chat": Workload("40 kB prompts, growing conversations", "/v1/chat/completions", _conversations),
    "stream": Workload(
        "64-token streams", "/v1/completions", _completions(400, streamed=True), True, 100 * STREAM_TOKENS
    ),
}
