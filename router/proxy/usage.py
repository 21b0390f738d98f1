"""The usage that an answer reports, in the answer's own bytes.

Text inside a JSON string has its quotes escaped, so no pattern here can match what a model generated.
"""

from __future__ import annotations

import re

_WINDOW = 4096
"""Bytes at an answer's end in which its usage is looked for."""
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,15})(?!\d)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d{1,15})(?!\d)')
_APART = re.compile(rb'"cache_(read|creation)_input_tokens":\s*(\d{1,15})(?!\d)')
"""Anthropic's form: `input_tokens` is without them.

Longer numbers count no tokens: int() refuses very long ones, and no float holds them.
"""
_OF_SEVERAL = re.compile(rb'"index":|\}\]\s*$')
_TOLD_FIRST = b'{"request_id":'
"""So vLLM's /inference/v1/generate begins what is not streamed: with its usage before what it generated."""
_BEGIN = 1024
_CACHED_OR_NOT = re.compile(rb'"cached_tokens":\s*(?:\d+|null)')
CACHED = b'"cached_tokens"'


def read_usage(recent: bytes, latest: bytes) -> tuple[int | None, int | None]:
    """(prompt tokens, cached tokens) from an answer's last two pieces; None for what they do not tell."""
    end = latest[-_WINDOW:] if len(latest) > _WINDOW else recent[-_WINDOW:] + latest
    start = end.rfind(b'"usage"')
    if start < 0:
        start = _meta_info(end)
    first = recent or latest
    if start < 0 and first.startswith(_TOLD_FIRST):
        end = first[:_BEGIN]
        start = end.find(b'"usage"')
    prompt = _PROMPT.search(end, start) if start >= 0 else None
    if not prompt:
        return None, None
    cached = _CACHED.search(end, start)
    if cached:
        return int(prompt[1]), int(cached[1])
    apart = {kind: int(tokens) for kind, tokens in _APART.findall(end, start)}
    return int(prompt[1]) + sum(apart.values()), apart.get(b"read")


def _meta_info(end: bytes) -> int:
    """Where SGLang's /generate tells the usage; -1 in an answer of several, where each tells its own."""
    start = end.rfind(b'"meta_info"')
    return -1 if start >= 0 and _OF_SEVERAL.search(end, start) else start


def with_cached(answer: bytes, cached_tokens: int) -> bytes:
    """`answer`, or a part of a stream, with another number of cached tokens."""
    return _CACHED_OR_NOT.sub(b'"cached_tokens":%d' % cached_tokens, answer)
