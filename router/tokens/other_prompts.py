"""What a batch of prompts asks of an engine beyond its first prompt, which alone is tokenized and looked up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from router.tokens.stand_ins import BYTES_PER_TOKEN

_MEASURED: Final = 64
"""Further prompts whose length is looked at; the rest are taken to be like them, so that a batch of thousands costs no
more than one of so many."""


def other_tokens(batch: Sequence[object], *, uncached: bool = False) -> int:
    """Tokens of all prompts after the first, without what they begin with as the first does, which an engine computes
    once, unless it computes each whole (`uncached`). An estimate: texts are taken to have a token for every
    `BYTES_PER_TOKEN` bytes, as ids have."""
    first, *measured = (_as_bytes(prompt) for prompt in batch[: 1 + _MEASURED])
    if not measured:
        return 0
    own = sum(len(prompt) - (0 if uncached else _common(first, prompt)) for prompt in measured)
    return own * (len(batch) - 1) // len(measured) // BYTES_PER_TOKEN


def _as_bytes(prompt: object) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return prompt.tobytes() if isinstance(prompt, np.ndarray) else b""


def _common(one: bytes, other: bytes) -> int:
    """How many bytes they begin with in common. Each byte is looked at once: prompts may have millions."""
    common, most = 0, min(len(one), len(other))
    while common < most:
        middle = (common + most + 1) // 2
        if one[common:middle] == other[common:middle]:
            common = middle
        else:
            most = middle - 1
    return common
