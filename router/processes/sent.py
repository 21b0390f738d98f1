"""Tells the other router processes through mapped memory which prompts this one has sent where, so that the blocks
which a prompt will leave on a rank count for the next decision of every process.

Each process writes a ring buffer of its own and reads those of the others. There are no locks: a record is valid once
the ring's count of written words includes it, and it begins with its own position. A reader that has fallen behind by a
whole ring, or sees words out of order, skips to the newest record. What it misses were predictions, for some seconds or
minutes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.hashing import SequenceHashes
from indexer.types import WorkerRank
from router.processes.columns import Columns

# A ring's first word counts the words that were ever written to it; the latest of them follow. A record consists of
# - its position, which is that count at its beginning, plus 1; or 0 where the record did not fit before the ring's end
#   and stands at the ring's beginning instead,
# - the rank's column in the shared books (upper half), `_GUESSED`, `_REFUSED` and the number of blocks (lower half),
# - the blocks' sequence hashes.
WORDS: Final = 1 << 19
"""Of each ring, 4 MiB: 800 prompts of 10,000 tokens, in blocks of 16. A process that is asked for nothing reads once a
second. What is never written takes no memory."""
_MOST: Final = WORDS // 16
"""Most blocks that are told of one prompt: of a longer one, only its beginning may be shared with others."""
_HEAD: Final = 2
_LENGTH_BITS: Final = 32
_GUESSED: Final = 1 << 31
_REFUSED: Final = 1 << 30


class Sent(NamedTuple):
    rank: WorkerRank
    chain: SequenceHashes
    """To be used at once: it lies in the ring, which will be overwritten."""
    guessed: bool
    """Whether its hashes are those of stand-ins."""
    refused: bool
    """Whether the rank refused the prompt, so that it will not hold these after all."""


class SentPrompts:
    def __init__(self, rings: npt.NDArray[np.uint64], own: int, columns: Columns) -> None:
        """`rings`: zeros at first, a row of `WORDS` for each process, of which `own` is this one's."""
        self._rings = [ring[1:] for ring in rings]
        self._written = [ring[:1].data for ring in rings]
        self._own = own
        self._columns = columns
        self._read = [written[0] for written in self._written]

    def tell(self, rank: WorkerRank, chain: SequenceHashes, *, guessed: bool, refused: bool = False) -> None:
        """This process has sent a prompt with the sequence hashes `chain` to `rank`. `guessed`, `refused`: as in
        `Sent`."""
        chain, column = chain[:_MOST], self._columns.get(rank)
        if not len(chain) or column is None:
            return
        ring, written = self._rings[self._own], self._written[self._own]
        at = written[0]
        start, words = at % len(ring), _HEAD + len(chain)
        if start + words > len(ring):
            ring[start] = 0
            at += len(ring) - start
            start = 0
        what = (_GUESSED if guessed else 0) | (_REFUSED if refused else 0) | len(chain)
        ring[start : start + _HEAD] = at + 1, column << _LENGTH_BITS | what
        ring[start + _HEAD : start + words] = chain
        written[0] = at + words

    def news(self) -> list[Sent]:
        """What the other processes have sent since the last call, or since the start."""
        found: list[Sent] = []
        for number, written in enumerate(self._written):
            if number != self._own and written[0] != self._read[number]:
                self._read_ring(number, written[0], found)
        return found

    def _read_ring(self, number: int, end: int, found: list[Sent]) -> None:
        ring, at = self._rings[number], self._read[number]
        self._read[number] = end
        while end - len(ring) <= at < end:
            start = at % len(ring)
            if not ring[start]:
                at += len(ring) - start
                continue
            what = int(ring[start + 1]) if ring[start] == at + 1 else 0
            words = what & (_REFUSED - 1)
            if not words:
                return
            at += _HEAD + words
            rank = self._columns.rank_at(what >> _LENGTH_BITS)
            if rank:
                chain = ring[start + _HEAD : start + _HEAD + words]
                found.append(Sent(rank, chain, bool(what & _GUESSED), bool(what & _REFUSED)))
