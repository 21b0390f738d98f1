"""Trace rows as requests for the simulated engine; their block hashes come straight from hash ids, without tokens."""

from __future__ import annotations

from typing import Final
from zlib import crc32

import numpy as np

from engines.sim.request import Request
from indexer.hashing import SequenceHashes
from indexer.types import PLAIN, Namespace
from router.ab.trace import Row

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST: Final = np.uint64(31)
_MASK: Final = (1 << 64) - 1


def sequence_hashes(row: Row, block_size: int) -> SequenceHashes:
    """One for each full block of the prompt. A hash id stands for content and all before it; so do parts of it, and the
    last of several.

    `block_size` must divide the row's block or be a multiple of it. Mixed by SplitMix64's finaliser (Steele, Lea and
    Flood 2014).
    """
    named = np.array([one & _MASK for one in row.hash_ids], np.uint64)  # some traces' are hashes, with a sign or long
    parts, several = max(1, row.block_tokens // block_size), max(1, block_size // row.block_tokens)
    named = named[several - 1 :: several]
    if row.adapter is not None:  # the same text has another KV
        named = named ^ (np.uint64(crc32(row.adapter.encode())) << np.uint64(32))
    ids = np.repeat(named * np.uint64(parts), parts)
    ids += np.tile(np.arange(parts, dtype=np.uint64), len(named))
    mixed = (ids[: row.input_length // block_size] + np.uint64(1)) * _STEP
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _LAST)


def make_request(index: int, attempt: int, row: Row, hashes: list[int], *, remote: bool = False) -> Request:
    """For a `Scheduler` whose answers are long enough that no two requests' answers are alike. A further attempt may
    come to a worker whose step still computes the one before, so it has an id of its own."""
    return Request(
        request_id=f"{index}.{attempt}",
        tokens=[0] * row.input_length,
        prompt_length=row.input_length,
        max_tokens=row.output_length,
        namespace=PLAIN if row.adapter is None else Namespace(row.adapter),
        hashes=list(hashes),
        answer_start=index,
        remote=remote,
    )
