"""The compiled pass of `numbers`: takes the numbers out of a KV event frame (docs/adr/0004-compiled-kernels.md)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.jit import loop

Bytes: TypeAlias = npt.NDArray[np.uint8]
Counts: TypeAlias = npt.NDArray[np.int64]
_Narrow: TypeAlias = npt.NDArray[np.uint32]
_Wide: TypeAlias = npt.NDArray[np.uint64]

NARROW, WIDE = 4, 8
"""Bytes of a number, and the type of the extension that stands for an array of such: up to 2^32 − 1, or any."""

FIXEXT8 = 0xD7
SIZE = 10
"""Bytes of that extension: its code, its type, where the numbers begin, how many they are (four bytes each). An array
that takes fewer stays, so that the copy is never longer."""

_REMOVED_MAP = np.frombuffer(b"\xa4type\xacBlockRemoved", np.uint8)
_REMOVED_ARRAY = np.frombuffer(b"\xacBlockRemoved", np.uint8)
_HASHES = np.frombuffer(b"\xacblock_hashes", np.uint8)

_WIDTHS = np.array(
    [0, -1, 0, 0, 1, 2, 4, -1, -1, -1, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, -1, -1, -1, -1, -1, 1, 2, 4, 2, 4, 2, 4], np.int64
)
"""By code from 0xC0: how many bytes belong to it, or to its length; −1 for extensions and what is no code."""

_8 = np.uint64(8)
_1 = np.uint64(1)
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)

# Indices into `state`, what a pass has written so far.
_OUT, _NARROWS, _WIDES = 0, 1, 2


@loop
def _big_endian(packed: Bytes, at: int, width: int) -> np.uint64:
    value = np.uint64(0)
    for i in range(at, at + width):
        value = (value << _8) | np.uint64(packed[i])
    return value


@loop
def _length(packed: Bytes, at: int, width: int) -> int:
    value = 0
    for i in range(at, at + width):
        value = (value << 8) | int(packed[i])
    return value


@loop
def _header(packed: Bytes, at: int) -> tuple[int, int, int]:
    """(values inside, where they begin, 1 for an array or 2 for a map); (0, −1, 0) for everything else."""
    if at >= len(packed):
        return 0, -1, 0
    code = int(packed[at])
    if 0x80 <= code < 0x90:
        return 2 * (code & 15), at + 1, 2
    if 0x90 <= code < 0xA0:
        return code & 15, at + 1, 1
    width = 2 if code in (0xDC, 0xDE) else 4
    if code < 0xDC or code > 0xDF or at + 1 + width > len(packed):
        return 0, -1, 0
    count = _length(packed, at + 1, width)
    return (count, at + 1 + width, 1) if code < 0xDE else (2 * count, at + 1 + width, 2)


@loop
def _skip(packed: Bytes, at: int) -> int:
    """The end of the value at `at`; −1 when it is cut off, or has an extension in it."""
    size = len(packed)
    left = 1
    while left:
        if at >= size:
            return -1
        code = int(packed[at])
        left -= 1
        inside, begin, kind = _header(packed, at)
        if kind:
            left += inside
            at = begin
        elif code < 0x80 or code >= 0xE0:
            at += 1
        elif code < 0xC0:
            at += 1 + (code & 31)
        else:
            width = _WIDTHS[code - 0xC0]
            if width < 0 or at + 1 + width > size:
                return -1
            at += 1 + width
            if 0xC4 <= code <= 0xC6 or 0xD9 <= code <= 0xDB:
                at += _length(packed, at - width, width)
    return at if at <= size else -1


@loop
def _read_narrow(packed: Bytes, at: int, count: int, narrow: _Narrow, into: int) -> int:
    """The end of `count` numbers up to 2^32 − 1, now in `narrow`; −1 when something else is among them."""
    size = len(packed)
    if at + count > size:
        return -1
    for i in range(into, into + count):
        if at + 5 > size and _skip(packed, at) < 0:
            return -1
        code = int(packed[at])
        if code < 0x80:
            narrow[i] = code
            at += 1
        elif code == 0xCD:
            narrow[i] = (np.uint32(packed[at + 1]) << 8) | np.uint32(packed[at + 2])
            at += 3
        elif code == 0xCE:
            narrow[i] = _big_endian(packed, at + 1, 4)
            at += 5
        elif code == 0xCC:
            narrow[i] = packed[at + 1]
            at += 2
        else:
            return -1
    return at


@loop
def _read_wide(packed: Bytes, at: int, count: int, wide: _Wide, into: int) -> int:
    """The end of `count` numbers of up to 64 bits, now in `wide` (negative ones modulo 2^64); −1 as above."""
    size = len(packed)
    if into + count > len(wide):
        return -1
    for i in range(into, into + count):
        if at >= size:
            return -1
        code = int(packed[at])
        if code < 0x80 or code >= 0xE0:
            wide[i] = np.uint64(code) if code < 0x80 else (_ONES << _8) | np.uint64(code)
            at += 1
            continue
        if code < 0xCC or code > 0xD3:
            return -1
        width = _WIDTHS[code - 0xC0]
        if at + 1 + width > size:
            return -1
        value = _big_endian(packed, at + 1, width)
        if code >= 0xD0 and width < 8 and (value >> np.uint64(8 * width - 1)) & _1:
            value |= _ONES << np.uint64(8 * width)
        wide[i] = value
        at += 1 + width
    return at


@loop
def _copy(packed: Bytes, begin: int, end: int, out: Bytes, state: Counts) -> None:
    at = state[_OUT]
    for i in range(end - begin):  # a slice would be copied first, in case that it overlaps
        out[at + i] = packed[begin + i]
    state[_OUT] += end - begin


@loop
def _put(value: int, at: int, out: Bytes) -> None:
    for i in range(4):
        out[at + i] = (value >> (24 - 8 * i)) & 0xFF


@loop
def _refer(kind: int, begin: int, count: int, out: Bytes, state: Counts) -> None:
    at = state[_OUT]
    out[at], out[at + 1] = FIXEXT8, kind
    _put(begin, at + 2, out)
    _put(count, at + 6, out)
    state[_OUT] = at + 10


@loop
def _value(packed: Bytes, at: int, out: Bytes, narrow: _Narrow, wide: _Wide, state: Counts) -> int:
    """Copies one value of an event; returns its end, or −1."""
    count, begin, kind = _header(packed, at)
    if kind == 1:
        narrows, wides = state[_NARROWS], state[_WIDES]
        end = _read_narrow(packed, begin, count, narrow, narrows)
        if end - at >= SIZE:
            state[_NARROWS] += count
            _refer(NARROW, narrows, count, out, state)
            return end
        end = _read_wide(packed, begin, count, wide, wides)
        if end - at >= SIZE:
            state[_WIDES] += count
            _refer(WIDE, wides, count, out, state)
            return end
    end = _skip(packed, at)
    if end >= 0:
        _copy(packed, at, end, out, state)
    return end


@loop
def _same(one: Bytes, other: Bytes) -> bool:
    """Whether they are, both being of one length. (Without a way out early it takes many bytes a step.)"""
    difference = np.uint8(0)
    for i in range(len(other)):
        difference |= one[i] ^ other[i]
    return bool(difference == 0)


@loop
def _begins(packed: Bytes, at: int, what: Bytes) -> bool:
    return at + len(what) <= len(packed) and _same(packed[at : at + len(what)], what)


@loop
def _run(packed: Bytes, begin: int, hash_at: int, end: int, left: int, wide: _Wide, state: Counts) -> int:
    """How many of the next `left` events are the one from `begin` to `end` with another hash, which goes to `wide`."""
    size, before, after = end - begin, hash_at - begin, hash_at + 9 - begin
    head, tail = packed[begin:hash_at], packed[begin + after : end]
    at, found = end, 0
    while found < left and at + size <= len(packed) and state[_WIDES] < len(wide):
        same = _same(packed[at : at + before], head) and _same(packed[at + after : at + size], tail)
        if not same or packed[at + before] not in (0xCF, 0xD3):
            break
        wide[state[_WIDES]] = _big_endian(packed, at + before + 1, 8)
        state[_WIDES] += 1
        found += 1
        at += size
    return found


@loop
def _event(packed: Bytes, begin: int, out: Bytes, narrow: _Narrow, wide: _Wide, state: Counts) -> tuple[int, int, int]:
    """Copies one event. Returns its end (or −1); where it has its hash, if it is a removal of one; where the copy has
    the number of hashes. (−1 where there is no such place.)"""
    inside, at, kind = _header(packed, begin)
    if not kind:
        return _value(packed, begin, out, narrow, wide, state), -1, -1
    removes = _begins(packed, begin + 1, _REMOVED_MAP) or _begins(packed, begin + 1, _REMOVED_ARRAY)
    _copy(packed, begin, at, out, state)
    key_at, hash_at, count_at, fields = -1, -1, -1, 0
    for i in range(inside):
        child, wides = at, state[_WIDES]
        at = _value(packed, child, out, narrow, wide, state)
        if at < 0:
            return -1, -1, -1
        if (i == 1) if kind == 1 else (i % 2 == 1 and _begins(packed, key_at, _HASHES)):
            fields += 1
            if state[_WIDES] == wides + 1 and packed[child + 1] in (0xCF, 0xD3):  # 0x91, and the one number
                hash_at, count_at = child + 1, state[_OUT] - 4
        elif state[_WIDES] != wides:
            fields += 1  # numbers that would come between this event's and the next one's
        key_at = child
    if not removes or fields != 1:
        return at, -1, -1
    return at, hash_at, count_at


@loop
def take_out(packed: Bytes, out: Bytes, narrow: _Narrow, wide: _Wide, events: Counts, state: Counts) -> tuple[int, int]:
    """How many bytes and events were written; (−1, 0) for a frame that is not understood here."""
    inside, at, kind = _header(packed, 0)
    if kind != 1 or inside < 2:
        return -1, 0
    at = _skip(packed, at)
    if at < 0:
        return -1, 0
    left, begin, kind = _header(packed, at)
    if kind != 1:
        return -1, 0
    _copy(packed, 0, at, out, state)
    state[_OUT] += 5
    written = 0
    while left:
        end, hash_at, count_at = _event(packed, begin, out, narrow, wide, state)
        if end < 0 or written == len(events):
            return -1, 0
        alike = 0
        if hash_at >= 0:
            alike = _run(packed, begin, hash_at, end, left - 1, wide, state)
            _put(1 + alike, count_at, out)
        begin = end + alike * (end - begin)
        events[written] = 1 + alike
        written += 1
        left -= 1 + alike
    out[at] = 0xDD
    _put(written, at + 1, out)
    _copy(packed, begin, len(packed), out, state)
    return state[_OUT], written
