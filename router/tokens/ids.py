"""Prompts that are token ids already: from JSON to an array, without a Python object for each."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.hashing import Tokens
from indexer.jit import loop

_LIST, _ZERO, _NINE = (ord(sign) for sign in "[09")
_AFTER = (ord(","), ord("]"))
_BLANKS = (9, 10, 13, 32)


def read_ids(raw: msgspec.Raw | bytes) -> Tokens | None:
    """Of a flat list of token ids; None for any other value. `raw` is one valid JSON value, no blanks around it."""
    view = memoryview(raw)
    if view.nbytes < 3 or view[0] != _LIST:
        return None
    text = np.frombuffer(view, np.uint8)
    ids = np.empty(len(text) // 2, np.uint32)
    count = _read(text, ids)
    return ids[:count] if count else None


@loop
def _read(text: npt.NDArray[np.uint8], ids: Tokens) -> int:
    """How many were read; 0 for anything that is no list of numbers below 2^32."""
    count, number = 0, -1
    for at in range(1, len(text)):
        sign = text[at]
        if _ZERO <= sign <= _NINE:
            number = max(number, 0) * 10 + (int(sign) - _ZERO)
            if number >= 2**32:
                return 0
        elif number >= 0 and sign in _AFTER:
            ids[count] = number
            count, number = count + 1, -1
        elif sign not in _BLANKS:
            return 0
    return count
