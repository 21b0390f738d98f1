"""Where in the rank's text an answer begins: a function of the tokens so far, however they came to be there.

A greedy engine that is given a prompt and the beginning of its answer goes on as if it had written that itself. So does
this one: the answer to `tokens` is read from where the hash of all tokens up to some point says, and that point is the
first from which on they were an answer already.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from indexer.hashing import Tokens, chain_hashes, pack_tokens
from indexer.jit import kernel

_SEED: Final = np.uint64(0)
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: spreads a token over all bits (Knuth, volume 3, section 6.4)."""
_FOLD: Final = np.uint64(32)
_NONE: Final = np.empty(0, np.uint32)


def answer_start(tokens: Tokens, answers: Tokens | None) -> int:
    """Index into `answers`, cyclic, of the token that follows `tokens`; without them a number that `tokens` decide."""
    return int(_find(tokens, _NONE if answers is None else answers))


def warm_up() -> None:
    """Compiles what the first request would wait for: a second and more, once on a machine."""
    answer_start(pack_tokens([1]), None)
    chain_hashes(pack_tokens([1]), 1, 0)


@kernel
def _find(tokens: Tokens, answers: Tokens) -> np.uint64:
    count, length = len(tokens), len(answers)
    state = _SEED
    for at in range(count):
        state = (state ^ (state >> _FOLD) ^ np.uint64(tokens[at] + 1)) * _FACTOR
        if not length:
            continue
        begin = int(((state >> _FOLD) * np.uint64(length)) >> _FOLD)  # scaled, which is quicker than a remainder
        known = 0
        while at + 1 + known < count and tokens[at + 1 + known] == answers[(begin + known) % length]:
            known += 1
        if at + 1 + known == count:
            return np.uint64(begin + known)
    return state >> _FOLD
