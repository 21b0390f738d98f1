"""Decodes JSON of any form."""

from __future__ import annotations

import gc
from typing import Any, Final

import msgspec

_LONG: Final = 128 * 1024
"""Bytes."""
_decode = msgspec.json.Decoder().decode


def decode_any(raw: bytes | msgspec.Raw) -> Any:
    """Python's collector would look for garbage again and again in what a long text becomes: 16 MB of empty lists would
    take ten times as long, while every stream waits. Raises as msgspec does."""
    if memoryview(raw).nbytes < _LONG or not gc.isenabled():
        return _decode(raw)
    gc.disable()
    try:
        return _decode(raw)
    finally:
        gc.enable()
