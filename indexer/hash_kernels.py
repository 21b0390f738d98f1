"""Compiled loops over a prompt's or an event's blocks: their chained hashes, and a sample of these."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.jit import loop

_Ids: TypeAlias = npt.NDArray[np.uint32]
_Words: TypeAlias = npt.NDArray[np.uint64]

ONE_IN: Final = 64
"""A power of two. Hashes are uniform, and their lowest bits as good as any."""
_MASK: Final = np.uint64(ONE_IN - 1)

# Literals in kernels would be signed; all arithmetic here is modulo 2^64.
_C1 = np.uint64(0x87C37B91114253D5)
_C2 = np.uint64(0x4CF5AD432745937F)
_C3 = np.uint64(0x52DCE729)
_F1 = np.uint64(0xFF51AFD7ED558CCD)
_F2 = np.uint64(0xC4CEB9FE1A85EC53)
_5, _27, _31, _33, _37 = (np.uint64(n) for n in (5, 27, 31, 33, 37))


@loop
def chain(tokens: _Ids, block_size: int, root: np.uint64, digests: _Words, hashes: _Words) -> None:
    mixed = root
    for block in range(len(hashes)):
        if block < len(digests):
            mixed ^= digests[block]
        for at in range(block * block_size, (block + 1) * block_size):
            word = np.uint64(tokens[at]) * _C1
            word = (word << _31) | (word >> _33)
            mixed ^= word * _C2
            mixed = ((mixed << _27) | (mixed >> _37)) * _5 + _C3
        mixed = (mixed ^ (mixed >> _33)) * _F1
        mixed = (mixed ^ (mixed >> _33)) * _F2
        mixed ^= mixed >> _33
        hashes[block] = mixed


@loop
def pick(hashes: _Words, picked: _Words) -> int:
    found = 0
    for hash_ in hashes:
        if not hash_ & _MASK:
            picked[found] = hash_
            found += 1
    return found
