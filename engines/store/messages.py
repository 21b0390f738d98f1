"""The bytes that vLLM hashes for a block: `(parent's digest, (token, …), extra keys or None)`, pickled or as CBOR.

All blocks of a prompt are written at once by compiled code, each with a gap where the digest of the block before it
goes: pickling them one by one takes longer than hashing them. Tests compare every form with what pickle itself writes.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from engines.store.keys import DIGEST_BYTES, Digest
from indexer.hashing import Tokens, pack_tokens
from indexer.jit import kernel

HashName = Literal["sha256", "sha256_cbor"]
ExtraKeys: TypeAlias = tuple[tuple[str, ...], ...]
"""Tagged: `("lora", name, path)`, then `("cache_salt", salt)`."""
_Bytes: TypeAlias = npt.NDArray[np.uint8]

# Pickle, protocol 5: PROTO 5, FRAME and its length, SHORT_BINBYTES 32, the gap, MEMOIZE, MARK.
_PICKLE_START = b"\x80\x05\x95" + bytes(8) + b"C" + bytes([DIGEST_BYTES]) + bytes(DIGEST_BYTES) + b"\x94("
_PICKLE_TOKENS_END = b"t\x94"
_PICKLE_END = b"\x87\x94."
_PICKLE_GAP = 13
_FRAME_AT, _FRAME_START = 3, 11
PICKLED_BLOCKS = range(4, 8193)
"""Tokens of blocks that can be written: less is pickled with other opcodes, more in several frames; no engine has
either."""
_SHORT_TUPLE_ENDS = (b")", b"\x85\x94", b"\x86\x94", b"\x87\x94")

_CBOR_GAP = 3  # array(3), bytes of one byte's length, 32


def seed_digest(name: HashName, seed: str) -> Digest:
    """The parent of every first block."""
    if name == "sha256":
        return hashlib.sha256(pickle.dumps(seed, protocol=5)).digest()
    return hashlib.sha256(_cbor_text(seed)).digest()


def chain(
    name: HashName, tokens: Tokens, block_size: int, parent: Digest, first: ExtraKeys, others: ExtraKeys
) -> list[Digest]:
    """`first` and `others`: the extra keys of the first block and of those behind it."""
    blocks = len(tokens) // block_size
    if first == others:
        return _digests(name, tokens[: blocks * block_size], block_size, parent, others)
    [*head] = _digests(name, tokens[: min(blocks, 1) * block_size], block_size, parent, first)
    if blocks < 2:
        return head
    return head + _digests(name, tokens[block_size : blocks * block_size], block_size, head[0], others)


def warm_up() -> None:
    """Compiles what writes the blocks, or reads it from disk; else the first request waits for it."""
    for name in get_args(HashName):
        chain(name, pack_tokens([0] * PICKLED_BLOCKS.start), PICKLED_BLOCKS.start, bytes(DIGEST_BYTES), (), ())


def _digests(name: HashName, tokens: Tokens, block_size: int, parent: Digest, extra: ExtraKeys) -> list[Digest]:
    if name == "sha256":
        tail = _PICKLE_TOKENS_END + _pickle_extra(extra) + _PICKLE_END
        written, ends = _write_pickles(tokens, block_size, _array(_PICKLE_START), _array(tail))
        gap = _PICKLE_GAP
    else:
        start = b"\x83\x58" + bytes([DIGEST_BYTES]) + bytes(DIGEST_BYTES) + _cbor_head(4, block_size)
        written, ends = _write_cbor(tokens, block_size, _array(start), _array(_cbor_extra(extra)))
        gap = _CBOR_GAP
    messages, sha256 = written.data, hashlib.sha256
    digests, at = [], 0
    for end in ends.tolist():
        messages[at + gap : at + gap + DIGEST_BYTES] = parent
        parent = sha256(messages[at:end]).digest()
        digests.append(parent)
        at = end
    return digests


@kernel
def _write_pickles(
    tokens: Tokens, block_size: int, start: _Bytes, tail: _Bytes
) -> tuple[_Bytes, npt.NDArray[np.int64]]:
    blocks = len(tokens) // block_size
    written = np.empty(blocks * (len(start) + len(tail)) + len(tokens) * 7, np.uint8)
    ends = np.empty(blocks, np.int64)
    at = 0
    for block in range(blocks):
        begin = at
        written[at : at + len(start)] = start
        at += len(start)
        for index in range(block * block_size, (block + 1) * block_size):
            token = tokens[index]
            if token < 0x100:
                written[at] = 0x4B  # BININT1
                width = 1
            elif token < 0x10000:
                written[at] = 0x4D  # BININT2
                width = 2
            elif token < 0x80000000:
                written[at] = 0x4A  # BININT
                width = 4
            else:
                written[at] = 0x8A  # LONG1, of five bytes: the sign needs one
                written[at + 1] = 5
                written[at + 6] = 0
                width = 4
            at += 1 if token < 0x80000000 else 2
            for shift in range(width):
                written[at] = (token >> np.uint32(8 * shift)) & np.uint32(0xFF)
                at += 1
            if token >= 0x80000000:
                at += 1
        written[at : at + len(tail)] = tail
        at += len(tail)
        frame = at - begin - _FRAME_START
        for index in range(8):
            written[begin + _FRAME_AT + index] = (frame >> (8 * index)) & 0xFF
        ends[block] = at
    return written, ends


@kernel
def _write_cbor(tokens: Tokens, block_size: int, start: _Bytes, tail: _Bytes) -> tuple[_Bytes, npt.NDArray[np.int64]]:
    blocks = len(tokens) // block_size
    written = np.empty(blocks * (len(start) + len(tail)) + len(tokens) * 5, np.uint8)
    ends = np.empty(blocks, np.int64)
    at = 0
    for block in range(blocks):
        written[at : at + len(start)] = start
        at += len(start)
        for index in range(block * block_size, (block + 1) * block_size):
            token = tokens[index]
            if token < 24:
                written[at] = token
                width = 0
            elif token < 0x100:
                written[at] = 0x18
                width = 1
            elif token < 0x10000:
                written[at] = 0x19
                width = 2
            else:
                written[at] = 0x1A
                width = 4
            at += 1
            for place in range(width):
                written[at] = (token >> np.uint32(8 * (width - 1 - place))) & np.uint32(0xFF)
                at += 1
        written[at : at + len(tail)] = tail
        at += len(tail)
        ends[block] = at
    return written, ends


def _array(data: bytes) -> _Bytes:
    return np.frombuffer(data, np.uint8)


def _pickle_extra(extra: ExtraKeys) -> bytes:
    if not extra:
        return b"N"
    return b"".join(map(_pickle_key, extra)) + _SHORT_TUPLE_ENDS[len(extra)]


def _pickle_key(key: tuple[str, ...]) -> bytes:
    return b"".join(map(_pickle_text, key)) + _SHORT_TUPLE_ENDS[len(key)]


def _pickle_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    if len(data) < 0x100:
        return b"\x8c" + bytes([len(data)]) + data + b"\x94"
    return b"X" + len(data).to_bytes(4, "little") + data + b"\x94"


def _cbor_extra(extra: ExtraKeys) -> bytes:
    if not extra:
        return b"\xf6"
    keys = (_cbor_head(4, len(key)) + b"".join(map(_cbor_text, key)) for key in extra)
    return _cbor_head(4, len(extra)) + b"".join(keys)


def _cbor_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _cbor_head(3, len(data)) + data


def _cbor_head(major: int, number: int) -> bytes:
    """A type and its length, in as few bytes as there can be."""
    if number < 24:
        return bytes([major << 5 | number])
    power = next(power for power in range(4) if number < 1 << (8 << power))
    return bytes([major << 5 | 24 + power]) + number.to_bytes(1 << power, "big")
