"""A fixed sample of all blocks, picked by their hashes, for statistics that are too costly to keep for each block."""

from __future__ import annotations

import numpy as np

from indexer.hash_kernels import pick
from indexer.hashing import SequenceHashes
from indexer.types import SequenceHash


def sample(hashes: SequenceHashes, secret: int) -> list[SequenceHash]:
    """Those of `hashes` that are in the sample, in order. Takes half a microsecond for a batch of events. `secret`: on
    which it depends what is in the sample; see `indexer.prefix_index.PrefixIndex`."""
    picked = np.empty(len(hashes), np.uint64)
    count = pick(hashes, picked, np.uint64(secret))
    found: list[SequenceHash] = picked[:count].tolist()
    return found


def warm_up() -> None:
    """Hashes of a batch are read-only, which is a type of its own to the compiler."""
    hashes = np.zeros(1, np.uint64)
    sample(hashes, 0)
    sample(np.frombuffer(hashes.tobytes(), np.uint64), 0)
