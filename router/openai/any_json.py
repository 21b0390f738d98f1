"""Decodes JSON of any form."""

from __future__ import annotations

from typing import Any

import msgspec

from router.uncollected import uncollected

_decode = msgspec.json.Decoder().decode


def decode_any(raw: bytes | msgspec.Raw) -> Any:
    """Raises as msgspec does."""
    return uncollected(_decode, raw, memoryview(raw).nbytes)
