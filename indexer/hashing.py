"""Our own chained block hash: the same for every engine, computed from token ids alone.

A block's *sequence hash* mixes its tokens into the sequence hash of the block before it (the namespace's root before
the first), so it depends on every token up to the block's end: equal hashes mean equal prefixes, with a chance of about
2^-64 against it for each pair, and the index needs no tree to match them (docs/adr/0001-flat-chained-hashes.md).

The tokens of a block are summed up, each pair mixed with a key of its position, and MurmurHash3's 64-bit finaliser
(Appleby, public domain) chains the sums. It is no cryptographic hash: whoever makes two prompts collide can misroute
them, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from indexer.hash_kernels import chain
from indexer.types import PLAIN, Namespace, SequenceHash

HASH_VERSION = 2
"""Sent with every batch on the event plane: hashes of different versions never match."""

Tokens: TypeAlias = npt.NDArray[np.uint32]
SequenceHashes: TypeAlias = npt.NDArray[np.uint64]

_NO_EXTRAS = np.zeros(0, np.uint64)
_PLAIN_ROOT = np.uint64(0)
"""Made once: after sleep it takes half as long as hashing a short prompt (docs/hot-path.md)."""


def root_hash(namespace: Namespace) -> SequenceHash:
    """Seed of a namespace's chains; 0 for the plain one."""
    if namespace == PLAIN:
        return 0
    lora, salt = (b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass") for part in namespace)
    # The length keeps ("a", "b") apart from ("ab", "").
    return xxhash.xxh3_64_intdigest(len(lora).to_bytes(8, "little") + lora + salt)


def pack_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """As an array. Raises OverflowError or TypeError for anything that is not a token id (an unsigned 32-bit
    number)."""
    return tokens if isinstance(tokens, np.ndarray) else np.frombuffer(array("I", tokens), dtype=np.uint32)


def chain_hashes(tokens: Tokens, block_size: int, root: SequenceHash, extras: Sequence[bytes] = ()) -> SequenceHashes:
    """Sequence hashes of all full blocks of `tokens`; a last partial block has none.

    `root` is the hash before the first block: a namespace's root or the parent block's hash. `extras[i]`, where given
    and not empty, is whatever else the engine mixed into block i (an image, say), so that it matches no plain text.
    """
    blocks = len(tokens) // block_size
    digests = _NO_EXTRAS
    if extras:
        digests = np.array([xxhash.xxh3_64_intdigest(e) if e else 0 for e in extras[:blocks]], np.uint64)
    hashes = np.empty(blocks, np.uint64)
    chain(tokens, block_size, np.uint64(root) if root else _PLAIN_ROOT, digests, hashes)
    return hashes
