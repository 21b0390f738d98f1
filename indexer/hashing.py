"""Our own chained block hash: the same for every engine, computed from token ids alone.

`h[i] = xxh3_64(tokens of block i as little-endian u32, seed = h[i-1])`, and `h[-1]` is the namespace's root. The value
depends on every token before the block's end, so equal hashes mean equal prefixes (64 bits: a chance of 2^-64 for each
pair) and the index needs no tree to match prefixes: see docs/adr/0001-flat-chained-hashes.md.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

from indexer.types import PLAIN, Namespace, SequenceHash

HASH_VERSION = 1
"""Goes with every batch on the event plane: hashes of different versions never match."""

_TOKEN_BYTES = 4


def root_hash(namespace: Namespace) -> SequenceHash:
    """Seed of a namespace's chains; 0 for the plain one."""
    if namespace == PLAIN:
        return 0
    lora, salt = (b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass") for part in namespace)
    # The length keeps ("a", "b") apart from ("ab", "").
    return xxhash.xxh3_64_intdigest(len(lora).to_bytes(8, "little") + lora + salt)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Little-endian u32 per token. Raises OverflowError or TypeError for what is no token id."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_hashes(
    packed: bytes, block_size: int, root: SequenceHash, extras: Sequence[bytes] = ()
) -> list[SequenceHash]:
    """Sequence hashes of all full blocks of `packed` tokens; a last partial block has none.

    `root` is the hash before the first block: a namespace's root or the parent block's hash. `extras[i]`, where given
    and not empty, is whatever else the engine mixed into block i (an image, say), so that it matches no plain text.
    """
    step = block_size * _TOKEN_BYTES
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(packed)
    hashes: list[SequenceHash] = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = digest(view[start : start + step], parent)
        if extras and (extra := extras[len(hashes)]):
            parent = digest(extra, parent)
        hashes.append(parent)
    return hashes
