"""Traces (pure): requests with arrival times, lengths, and a hash id for each block of their prompts.

Equal ids mean equal content after an equal prefix, so ids alone say what a prefix cache could have kept. `synthesize`
makes small traces, so that a run needs no file from outside; `router.ab.trace_file` reads recorded ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

from router.ab.errors import RunError

BLOCK_TOKENS = 512
"""Input tokens per hash id in Mooncake's traces and in those made here."""


class Row(msgspec.Struct, frozen=True):
    """One request. `timestamp` in ms since the trace began; lengths in tokens, as is `block_tokens`, the content of one
    hash id; the last id may stand for fewer. `adapter`: the LoRA adapter that is asked for."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    adapter: str | None = None


def stretch(
    rows: Iterable[Row], duration: float | None = None, limit: int | None = None, max_output: int | None = None
) -> list[Row]:
    """The rows of the trace's first `duration` seconds, at most `limit`, with answers cut to `max_output`."""
    kept = [row for row in rows if duration is None or row.timestamp < duration * 1000][:limit]
    if max_output is None:
        return kept
    return [msgspec.structs.replace(row, output_length=min(row.output_length, max_output)) for row in kept]


def without_reuse(rows: Iterable[Row]) -> list[Row]:
    """The same requests, but with no shared prefixes."""
    fresh = count()
    return [msgspec.structs.replace(row, hash_ids=tuple(next(fresh) for _ in row.hash_ids)) for row in rows]


def reuse(rows: Iterable[Row]) -> float:
    """The share of prompt tokens that a single unbounded cache would have held."""
    seen: set[int] = set()
    hit = total = 0
    for row in rows:
        for position, block in enumerate(row.hash_ids):
            tokens = min(row.block_tokens, row.input_length - position * row.block_tokens)
            total += tokens
            hit += tokens if block in seen else 0
            seen.add(block)
    return hit / total if total else 0.0


def describe(rows: Sequence[Row], rate: float) -> dict[str, float]:
    """The load of rows sent at `rate` times their own rate: seconds are simulated, tokens are means."""
    return {
        "requests": len(rows),
        "seconds": (rows[-1].timestamp - rows[0].timestamp) / 1000 / rate,
        "input_tokens": sum(row.input_length for row in rows) / len(rows),
        "output_tokens": sum(row.output_length for row in rows) / len(rows),
        "reuse": reuse(rows),
    }


class Shape(NamedTuple):
    """The shape of a kind of traffic, in tokens and seconds. Ranges are uniform distributions."""

    system: int
    opening: tuple[int, int]
    turn: tuple[int, int]
    answer: tuple[int, int]
    turns: tuple[int, int]
    think: tuple[float, float]
    conversations_per_second: float


SHAPES = {
    # People: a shared system prompt, a document or question to begin with, then turns with time to think.
    "conversation": Shape(1024, (1024, 8192), (64, 768), (32, 256), (2, 8), (4.0, 30.0), 0.6),
    # Programs: long instructions for all, many short steps in quick succession.
    "agent": Shape(6144, (512, 4096), (128, 1536), (16, 96), (4, 16), (1.0, 6.0), 0.3),
}


def synthesize(kind: str, seed: int, duration: float = 240.0) -> list[Row]:
    """A trace of `duration` seconds: conversations that share a system prompt and grow turn by turn.

    Raises RunError for a kind that is not in SHAPES.
    """
    if kind not in SHAPES:
        raise RunError(f"no synthetic trace is called {kind!r}; there are: {', '.join(SHAPES)}")
    shape, rng, fresh = SHAPES[kind], random.Random(seed), count()  # noqa: S311 - traffic, not secrets
    system = [next(fresh) for _ in range(shape.system // BLOCK_TOKENS)]
    rows: list[Row] = []
    start = rng.expovariate(shape.conversations_per_second)
    while start < duration:
        rows += _conversation(shape, rng, start, system, fresh)
        start += rng.expovariate(shape.conversations_per_second)
    return sorted((row for row in rows if row.timestamp < duration * 1000), key=lambda row: row.timestamp)


def _conversation(shape: Shape, rng: random.Random, start: float, system: list[int], fresh: count[int]) -> list[Row]:
    """The turns of a conversation: each prompt is the whole conversation so far, with answers, and something new."""
    rows, blocks, at = [], list(system), start
    length = len(system) * BLOCK_TOKENS + rng.randint(*shape.opening)
    for _ in range(rng.randint(*shape.turns)):
        whole = length // BLOCK_TOKENS
        blocks += [next(fresh) for _ in range(whole - len(blocks))]
        # The content of a partial block changes as the conversation grows, so its id does not occur again.
        partial = [next(fresh)] if length % BLOCK_TOKENS else []
        answer = rng.randint(*shape.answer)
        rows.append(Row(round(at * 1000), length, answer, (*blocks, *partial)))
        length += answer + rng.randint(*shape.turn)
        at += rng.uniform(*shape.think)
    return rows
