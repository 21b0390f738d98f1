"""Compiled loops over a prompt's or an event's blocks: their chained hashes, and a sample of these."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.jit import inlined, loop

_Ids: TypeAlias = npt.NDArray[np.uint32]
_Words: TypeAlias = npt.NDArray[np.uint64]

ONE_IN: Final = 64
"""A power of two."""
_SAMPLE_SHIFT: Final = np.uint64(65 - ONE_IN.bit_length())

# Literals in kernels would be signed; all arithmetic here is modulo 2^64.
_C1 = np.uint64(0x87C37B91114253D5)
_C2 = np.uint64(0x4CF5AD432745937F)
_STEP = np.uint64(0x3C6EF372FE94F82A)
"""Twice the golden ratio: keys stay odd, so that multiplying by them loses nothing."""
_F1 = np.uint64(0xFF51AFD7ED558CCD)
_F2 = np.uint64(0xC4CEB9FE1A85EC53)
_0, _1, _2, _32, _33 = (np.uint64(n) for n in (0, 1, 2, 32, 33))


@inlined
def _keyed(word: np.uint64, key: np.uint64) -> np.uint64:
    word = (word ^ key) * _C1
    return (word ^ (word >> _33)) * key


@loop
def chain(tokens: _Ids, block_size: int, root: np.uint64, digests: _Words, hashes: _Words) -> None:
    """The parts of a block's sum do not wait for each other, and the next block's do not wait for the finaliser: a
    sixth of the time of mixing token after token. Positions are unsigned, since numba would look for negative ones."""
    mixed, at = root, _0
    for block in range(len(hashes)):
        own, key = _0, _C2
        for _ in range(block_size >> 1):
            own += _keyed(np.uint64(tokens[at]) | np.uint64(tokens[at + _1]) << _32, key)
            key += _STEP
            at += _2
        if block_size & 1:
            own += _keyed(np.uint64(tokens[at]), key)
            at += _1
        if block < len(digests):
            own ^= digests[block]
        mixed ^= own
        mixed = (mixed ^ (mixed >> _33)) * _F1
        mixed = (mixed ^ (mixed >> _33)) * _F2
        mixed ^= mixed >> _33
        hashes[block] = mixed


@loop
def pick(hashes: _Words, picked: _Words, secret: np.uint64) -> int:
    """By bits that depend on the secret, and on all of the hash: clients choose what hashes their blocks have."""
    found = 0
    for hash_ in hashes:
        mixed = (hash_ ^ secret) * _F1
        mixed = (mixed ^ (mixed >> _33)) * (secret | _1)
        if not mixed >> _SAMPLE_SHIFT:
            picked[found] = hash_
            found += 1
    return found
