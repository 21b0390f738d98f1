"""What the master of a shared store answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable

from engines.store import (
    SglangLayout,
    VllmLayout,
    query_path,
    read_keys,
    read_present,
    read_query,
    read_segments,
    verify,
)
from tests.engines.recordings import exchanges
from tests.fuzz.target import DEEP_JSON, JSON, Target, place

_LAYOUTS = (VllmLayout(model="m", block_size=16), SglangLayout(model="m", block_size=16))


def _answers(data: bytes) -> Hashable:
    """ValueError, and nothing else. The short way to what is there finds what the long way finds."""
    stored, present = _or_error(read_query, data), _or_error(read_present, data)
    if isinstance(stored, dict):
        assert present == set(stored)
    segments = _or_error(read_segments, data)
    return tuple(found if isinstance(found, tuple) else len(found) for found in (stored, present, segments))


def _or_error(read: Callable[[bytes], Collection[object]], data: bytes) -> Collection[object]:
    try:
        return read(data)
    except ValueError as error:
        return (place(error),)


def _keys(data: bytes) -> Hashable:
    """A list of keys, compared with what would be asked for."""
    try:
        keys = read_keys(data)
    except ValueError:
        return "no text"
    path = query_path(keys)
    assert path is None or (path.isascii() and " " not in path)
    verdicts = [verify(keys, layout) for layout in _LAYOUTS]
    assert all(len(verdict.why) < 1000 + len(data) for verdict in verdicts)
    return tuple((verdict.agrees, verdict.why[:40]) for verdict in verdicts)


def _recorded() -> list[bytes]:
    found = [
        each["response"]["body"] for each in exchanges("vllm-0.32.0-mooncake") if each["step"].startswith("master")
    ]
    made: list[object] = [
        {"success": False, "error": "no"},
        {"success": True, "data": {"k": {"ok": True, "local_disk_values": [{"object_size": 5}]}}},
        {"segments": [{"segment_name": "a", "te_endpoint": "b:1", "size_bytes": 5, "allocator_used_bytes": 1}]},
    ]
    return [body.encode() if isinstance(body, str) else json.dumps(body).encode() for body in (*found, *made)]


def _key_lists() -> list[bytes]:
    keys = [key for layout in _LAYOUTS for key in layout.keys(b"d" * 32)]
    return ["\n".join(keys).encode(), *(key.encode() for key in keys)]


_WORDS = (
    *DEEP_JSON, b'"ok":true', b'"ok":false', b'"values":[]', b'"values":null', b'"values":[ ]', b'"size_":5',
    b'"disk_values":[{}]', b'"success":true', b'"data":{', b"@tp_rank:0", b"@group:1", b"@pp_rank:", b"@store_tp:2",
    b"_k", b"_v", b"\n", b"ab" * 32, b"@", b"\xff", b",", b" ", b"9" * 4400,
)  # fmt: skip

TARGETS = (
    Target("store-answers", _answers, _recorded, _WORDS, JSON),
    Target("store-keys", _keys, _key_lists, _WORDS, share=40),
)
