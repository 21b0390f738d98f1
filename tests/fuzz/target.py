"""What can be fuzzed."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import msgspec


class Tree(NamedTuple):
    """How inputs are read and written as lists, maps and plain values; `decode` raises what is in UNREADABLE."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError)
JSON = Tree(msgspec.json.Decoder().decode, msgspec.json.Encoder().encode)
MSGPACK = Tree(msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode)
DEEP_JSON = (b"[" * 3000, b'{"a":' * 3000)
DEEP_MSGPACK = (b"\x91" * 3000, b"\x81\xa1a" * 3000)


class Target(NamedTuple):
    """`run` takes any bytes and raises where a property does not hold. What it returns says what came of them: an input
    with an outcome that was not seen before is kept, to be changed further."""

    name: str
    run: Callable[[bytes], Hashable]
    seeds: Callable[[], Sequence[bytes]]
    words: Sequence[bytes] = ()
    """What the format is made of."""
    tree: Tree | None = None
    share: int = 100
    """Of all executions, beside the other targets: fewer where one takes long."""
    largest: int = 8 * 1024
    """Bytes of an input: beyond, only time grows."""


def pieces(data: bytes) -> list[bytes]:
    """`data` cut into single bytes or at some points, always the same for the same data."""
    draw = random.Random(zlib.crc32(data))
    if draw.random() < 0.1:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(int(draw.random() * (len(data) + 1)) for _ in range(1 + int(draw.random() * 6)))
    return [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)]) if end > start]


def place(error: BaseException) -> Hashable:
    """What was raised, and from which line: an outcome that does not depend on what the message quotes."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return type(error).__name__, trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def coin(data: bytes, number: int = 0) -> bool:
    """Heads or tails, always the same for the same data."""
    return bool(zlib.adler32(data) >> number & 1)
