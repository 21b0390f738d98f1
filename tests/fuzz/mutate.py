"""Inputs from inputs: bytes changed, parts of another put in, and where there is a tree in them, the tree changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.fuzz.target import UNREADABLE, Target

_ODD_BYTES = b"\x00\x01\x7f\x80\xff\r\n \t\"'\\{}[]:;,%-+0_"
_NUMBERS = (
    -1, 0, 1, 2, 15, 16, 17, 127, 128, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1,
    2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
_ODD_NUMBERS = (
    "²".encode(), "٣".encode(), b"NaN", b"+Inf", b"2" * 30, b"9" * 4400, b"1e999", b"0x1", b"-0", b"1_0", b"+1",
    *(b"%d" % each for each in _NUMBERS),
)  # fmt: skip
_DIGITS = re.compile(rb"\d+")
_LEAVES = (None, True, False, "", "a", "é\ud7ff", "x" * 300, 0.5, -0.0, 1e300, b"", b"12345678", *_NUMBERS)


def mutate(draw: Random, data: bytes, other: bytes, target: Target) -> bytes:
    """`data` changed a little, at most `target.largest` bytes; `other` gives parts to put in."""
    if target.tree and draw.random() < 0.6:
        try:
            return target.tree.encode(_change_tree(draw, target.tree.decode(data)))[: target.largest]
        except UNREADABLE:
            pass  # no tree, or one that cannot be written: its bytes will do
    for _ in range(1 + int(draw.random() * 3)):
        data = _pick(draw, _EDITS)(draw, data, other, target.words)
    return data[: target.largest]


def _pick(draw: Random, choices: Sequence[Any]) -> Any:
    return choices[int(draw.random() * len(choices))]


def _range(draw: Random, data: bytes) -> tuple[int, int]:
    """Mostly a short one."""
    start = int(draw.random() * (len(data) + 1))
    most = 8 if draw.random() < 0.7 else 512
    return start, min(len(data), start + int(draw.random() * most))


def _flip(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    at = int(draw.random() * (len(data) or 1))
    return data[:at] + bytes([(data[at] if data else 0) ^ 1 << int(draw.random() * 8)]) + data[at + 1 :]


def _set(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    at = int(draw.random() * (len(data) or 1))
    odd = int(draw.random() * len(_ODD_BYTES))
    return data[:at] + _ODD_BYTES[odd : odd + 1] + data[at + 1 :]


def _delete(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    start, end = _range(draw, data)
    return data[:start] + data[end:]


def _repeat(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    start, end = _range(draw, data)
    return data[:end] + data[start:end] * (1 + int(draw.random() * 3)) + data[end:]


def _insert(draw: Random, data: bytes, _other: bytes, words: Sequence[bytes]) -> bytes:
    start, end = _range(draw, data)
    if draw.random() < 0.5:
        end = start
    return data[:start] + (_pick(draw, words) if words else b"\xff") + data[end:]


def _splice(draw: Random, data: bytes, other: bytes, _words: Sequence[bytes]) -> bytes:
    start, end = _range(draw, other)
    at = int(draw.random() * (len(data) + 1))
    return data[:at] + (other[start:] if draw.random() < 0.5 else other[start:end] + data[at:])


def _number(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    found = _DIGITS.search(data, int(draw.random() * (len(data) or 1)))
    return data[: found.start()] + _pick(draw, _ODD_NUMBERS) + data[found.end() :] if found else data


def _cut(draw: Random, data: bytes, _other: bytes, _words: Sequence[bytes]) -> bytes:
    return data[: int(draw.random() * (len(data) + 1))]


_EDITS: Sequence[Callable[[Random, bytes, bytes, Sequence[bytes]], bytes]] = (
    _flip, _set, _set, _delete, _delete, _repeat, _insert, _insert, _insert, _splice, _number, _cut
)  # fmt: skip


def _change_tree(draw: Random, root: Any) -> Any:
    """One to three nodes of `root` changed, in place where that can be."""
    held = [root]
    for _ in range(1 + int(draw.random() * 3)):
        parent: Any = held
        key: Any = 0
        while isinstance(parent[key], list | dict) and parent[key] and draw.random() < 0.85:
            parent = parent[key]
            key = _pick(draw, list(parent) if isinstance(parent, dict) else range(len(parent)))
        _change_node(draw, parent, key)
        if not held:
            return None
    return held[0]


def _change_node(draw: Random, parent: Any, key: Any) -> None:
    match int(draw.random() * 6):
        case 0 | 1:
            parent[key] = _pick(draw, _LEAVES)
        case 2:
            del parent[key]
        case 3 if isinstance(parent, list):
            parent.insert(key, parent[int(draw.random() * len(parent))])
        case 3:
            parent[_pick(draw, ("", "0", "type", str(key) * 2, 7))] = parent[key]
        case 4:
            parent[key] = [parent[key]] if draw.random() < 0.5 else {"a": parent[key]}
        case _:
            parent[key] = _changed_value(draw, parent[key])


def _changed_value(draw: Random, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value + _pick(draw, _NUMBERS)
    if isinstance(value, str | bytes) and draw.random() < 0.7:
        return value[: int(draw.random() * len(value))] if draw.random() < 0.5 else value * 2
    return [value] * int(draw.random() * 40)
