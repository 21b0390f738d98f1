"""Prompts made of a topic (a long prefix, the same for the same name) and a tail that nothing else has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

Kind = Literal["ids", "text", "chat"]
KINDS: tuple[Kind, ...] = ("ids", "text", "chat")

VOCABULARY = 4096
TOPIC_TOKENS = 416
TOPIC_WORDS = 200
PREFIX_LEAST = 350
"""Every kind of prompt has at least this many tokens of topic in full blocks."""
# Awkward on purpose: accents, other scripts, numbers, blanks, and text that looks like a special token.
WORDS = (
    *(
        "the",
        "prefix",
        "cache",
        "holds",
        "blocks",
        "of",
        "tokens",
        "read",
        "before",
        "self.assertEqual(a,",
        "b)",
    ),
    *("naïve", "café", "東京", "🙂", "ПРИВЕТ", "ﬁne", "don't", "3.14159", "1,000,000", "x_y[0]", "CamelCase", "&amp;"),
    *("", "a\ttab", "two\n\nlines", "no\u00a0break", "<|im_end|>", "--flag=value"),
)
_numbers = itertools.count()


def ids(name: str, count: int) -> list[int]:
    """Token ids fixed by the name; special tokens are left out."""
    chance = random.Random(name)
    return [chance.randrange(5, 4000) for _ in range(count)]


def words(name: str, count: int) -> str:
    chance = random.Random(name)
    return " ".join(chance.choice(WORDS) for _ in range(count))


def request(kind: Kind, topic: str, *, stream: bool = False, tail: str | None = None) -> dict[str, Any]:
    """A body whose prompt is the topic and a tail, by default one never used before. Deterministic, one token out."""
    tail = tail or f"tail {next(_numbers)}"
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "ids":
        return body | {"prompt": ids(topic, TOPIC_TOKENS) + ids(tail, 12)}
    if kind == "text":
        return body | {"prompt": f"{words(topic, TOPIC_WORDS)} {tail}"}
    system = {"role": "system", "content": words(topic, TOPIC_WORDS)}
    return body | {"messages": [system, {"role": "user", "content": tail}]}


def filler(name: str, count: int) -> dict[str, Any]:
    """A prompt of `count` tokens that shares nothing with any other."""
    return {"model": "tiny", "max_tokens": 1, "temperature": 0, "ignore_eos": True, "prompt": ids(name, count)}


def conversations(chance: random.Random, count: int) -> Iterator[list[int]]:
    """Beginnings of six topics with tails of their own, and what goes on where an earlier one ended."""
    said: list[list[int]] = []
    for number in range(count):
        if said and chance.random() < 0.4:
            prompt = chance.choice(said[-8:]) + ids(f"more {number}", chance.choice([10, 100]))
        else:
            topic = ids(f"hybrid {chance.randrange(6)}", chance.choice([64, 160, 300, 500, 700]))
            prompt = topic + ids(f"tail {number}", chance.choice([0, 40, 200, 600]))
        said.append(prompt[:1900])
        yield said[-1]
