"""Clients choose the hashes of their prompts' blocks, and cannot have them in one place of a table.

Hashes that differ in every combination of certain bits do so whatever secret they are XORed with. For some choices of
these bits they lie close together once multiplied by a number that everybody knows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from indexer.handle_kernels import KEY
from indexer.handles import BlockHandles
from indexer.hashing import SequenceHashes
from indexer.lives import Lives
from indexer.prefix_index import PrefixIndex
from indexer.types import Tier, WorkerRank

OF_INDEX = (3, 13, 17, 18, 19, 33, 34, 35, 36, 37, 38, 49, 50, 54, 55, 56)
OF_OTHERS = (8, 16, 17, 18, 19, 20, 26, 29, 47, 48, 49, 50, 51)
"""Bits that are among the worst for the first factor in `indexer.kernels`, and in the other tables."""
LONGEST = 500
"""Steps of a look-up at most; some 100 if all is random."""

secrets = pytest.mark.parametrize("secret", [0x1F3D5B79A2C4E608, 0x7E1B20C6D3A59F41, 0x0D96A3F17B5E82C4])


def combinations(bits: tuple[int, ...]) -> SequenceHashes:
    found = np.zeros(1, np.uint64)
    for bit in bits:
        found = np.concatenate([found, found | np.uint64(1 << bit)])
    return found


def longest_run(taken: npt.NDArray[np.bool_]) -> int:
    return int(np.diff(np.flatnonzero(~taken), prepend=-1, append=len(taken)).max()) - 1


@secrets
def test_the_index(secret: int) -> None:
    index = PrefixIndex(secret=secret)
    index.store(WorkerRank("w", 0), Tier.GPU, combinations(OF_INDEX))
    assert longest_run(index._tables[Tier.GPU]._table[::2] > 1) < LONGEST


@secrets
def test_handles(secret: int) -> None:
    handles, names = BlockHandles(secret=secret), combinations(OF_OTHERS)
    handles.store(Tier.GPU, names, None, [0] * len(names), 1, 0)
    assert longest_run(handles._names[:, KEY] > 0) < LONGEST
    handles.adopt(Tier.GPU, np.arange(len(names), dtype=np.uint64), names)
    assert longest_run(handles._held[:, KEY] > 0) < LONGEST


@secrets
def test_lives(secret: int) -> None:
    lives = Lives(secret)
    lives.renew(0, combinations(OF_OTHERS)[:-100], 1)  # it would grow with one for each row
    assert longest_run(lives._places > 0) < LONGEST
