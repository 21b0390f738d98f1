"""Numbers taken out of a KV event frame before anything else reads it.

A prompt's event is thousands of token ids and hundreds of block hashes, and then come as many events that each remove
one block. Making a Python object of each costs more than all else that is done with them. So one compiled pass copies
the frame without them: an event's arrays of whole numbers go into numpy arrays, and where they stood the frame now says
which (a msgpack extension, which no engine sends). Neighbouring removals that differ in their only hash become one
event with all the hashes. What is left has some hundred bytes and means the same; it is for msgspec to judge.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from engines import number_kernels
from engines.number_kernels import FIXEXT8, NARROW, WIDE
from indexer.hashing import SequenceHashes, Tokens

_STANDS_FOR = struct.Struct(">BBII")
"""Of an extension: its code, its type, where the numbers begin, how many they are."""

_NOWHERE = slice(0, 0)

_EXTRA = 8
"""Bytes by which the copy may be longer: its number of events always takes five."""


class Numbers:
    """The arrays taken out of one frame."""

    def __init__(self, narrow: Tokens, wide: SequenceHashes) -> None:
        self.narrow = narrow
        self.wide = wide

    def tokens(self, packed: msgspec.Raw) -> Tokens | None:
        """Those that `packed` stands for; None where it stands for nothing. ValueError for what is no token id."""
        kind, where = self._where(packed)
        if kind == WIDE and self.wide[where].max() >= 1 << 32:
            raise ValueError("token ids of more than 32 bits")
        return self.narrow[where] if kind == NARROW else self.wide[where].astype(np.uint32) if kind else None

    def hashes(self, packed: msgspec.Raw) -> SequenceHashes | None:
        """Those that `packed` stands for; None where it stands for nothing."""
        kind, where = self._where(packed)
        return self.wide[where] if kind == WIDE else self.narrow[where].astype(np.uint64) if kind else None

    def _where(self, packed: msgspec.Raw) -> tuple[int, slice]:
        """NARROW or WIDE, and which of them; 0 when `packed` is what it says."""
        if not len(self.narrow):
            return 0, _NOWHERE
        try:
            code, kind, begin, count = _STANDS_FOR.unpack(packed)
        except struct.error:
            return 0, _NOWHERE
        return (kind, slice(begin, begin + count)) if code == FIXEXT8 else (0, _NOWHERE)


NONE = Numbers(np.zeros(0, np.uint32), np.zeros(0, np.uint64))
"""Of a frame from which nothing was taken; an extension there is the engine's own."""


class Digest:
    def __init__(self, frame: bytes | memoryview, numbers: Numbers, events: list[int] | None) -> None:
        self.frame = frame
        self.numbers = numbers
        self.events = events
        """For each event of the frame, how many it stands for; None: itself."""


def take_out(payload: bytes) -> Digest:
    """The frame without its numbers; as it is where that cannot be done."""
    size = len(payload)
    out = np.empty(size + _EXTRA, np.uint8)
    narrow, wide = np.empty(size, np.uint32), np.empty(size // 8, np.uint64)
    events, state = np.empty(1 + size // 16, np.int64), np.zeros(3, np.int64)
    length, count = number_kernels.take_out(np.frombuffer(payload, np.uint8), out, narrow, wide, events, state)
    if length < 0:
        return Digest(payload, NONE, None)
    return Digest(out[:length].data, Numbers(narrow, wide), events[:count].tolist())


def warm_up() -> None:
    """Compiles everything: seconds the first time on a machine, a fraction of one after."""
    take_out(b"")
