"""Events with lists in place of arrays, so that they can be compared."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.events import (
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    WindowRemoved,
    WindowStored,
)
from indexer.handles import block_names


def plain(event: EngineEvent) -> EngineEvent:
    """Block hashes become names; a store's tokens stay what they are."""
    if isinstance(event, BlockStored | BlockCopied | BlockRemoved | WindowStored | WindowRemoved):
        changes: dict[str, Any] = {"engine_hashes": block_names(event.engine_hashes).tolist()}
        if isinstance(event, BlockStored):
            changes["token_ids"] = [int(token) for token in event.token_ids]
        return msgspec.structs.replace(event, **changes)
    return event


def plain_batch(batch: EngineBatch) -> EngineBatch:
    return msgspec.structs.replace(batch, events=[plain(event) for event in batch.events])
