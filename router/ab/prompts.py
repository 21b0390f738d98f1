"""Makes request bodies from trace rows (pure): the content for a hash id is a function of the id.

A body of 14,000 token ids is 80 kB of JSON. Formatting each number would cost more than the rest of the client, so the
JSON text of a block is joined from ready-made phrases of eight ids, and cached, since conversations repeat blocks.
"""

from __future__ import annotations

import hashlib
import random
import struct
from functools import cache, lru_cache

import msgspec

from router.ab.trace import Row

FIRST_TOKEN, END_TOKEN = 10, 30_000
"""Token ids are drawn from [FIRST_TOKEN, END_TOKEN): below any model's vocabulary size, above the special ids."""

_PHRASE_TOKENS = 8
"""A divisor of every trace's block."""


@cache
def _phrases() -> tuple[bytes, ...]:
    """2**16 phrases, so that two bytes of a block's digest pick one."""
    rng = random.Random(0)  # noqa: S311 - content, not secrets
    words = [b"%d" % token for token in range(FIRST_TOKEN, END_TOKEN)]
    return tuple(b",".join(rng.choices(words, k=_PHRASE_TOKENS)) for _ in range(1 << 16))


@lru_cache(maxsize=16_384)
def block_text(seed: int, block: int, tokens: int) -> bytes:
    """A block's token ids, a multiple of eight, comma-separated: a function of seed and id, the same on every
    machine."""
    picks = struct.Struct(f"<{tokens // _PHRASE_TOKENS}H")
    drawn = picks.unpack(hashlib.shake_128(b"%d:%d" % (seed, block)).digest(picks.size))
    return b",".join(map(_phrases().__getitem__, drawn))


def prompt_text(row: Row, seed: int) -> bytes:
    """A row's prompt as the inside of a JSON array; `row.input_length` ids."""
    *whole, last = row.hash_ids
    size = row.block_tokens
    tail = row.input_length - len(whole) * size
    parts = [block_text(seed, block, size) for block in whole]
    parts += block_text(seed, last, size).split(b",")[:tail]
    return b",".join(parts)


def completion_body(row: Row, model: str, seed: int) -> bytes:
    """The body of POST /v1/completions: streamed, greedy, exactly `row.output_length` tokens, usage at the end."""
    return b"".join(
        (
            b'{"model":',
            msgspec.json.encode(model),
            b',"max_tokens":%d,"min_tokens":%d' % (row.output_length, row.output_length),
            b',"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{"include_usage":true},"prompt":[',
            prompt_text(row, seed),
            b"]}",
        )
    )
