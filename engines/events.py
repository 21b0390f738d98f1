"""One engine's KV events, decoded and normalised: what `engines.vllm.decode` and `engines.sglang.decode` share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from indexer.handles import BlockNames
from indexer.hashing import Tokens
from indexer.types import EngineHash, Namespace, Tier


class MalformedEvent(Exception):
    """A frame that is not what the engine's protocol says; the message says what is wrong and never quotes tokens."""


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """`len(engine_hashes)` contiguous blocks of `block_size` tokens each, following `parent` (None: from the start)."""

    engine_hashes: Sequence[EngineHash] | BlockNames
    parent: EngineHash | None
    token_ids: Sequence[int] | Tokens
    block_size: int
    tier: Tier
    namespace: Namespace = Namespace()
    """Means something only where parent is None: children inherit their parent's."""
    extras: tuple[bytes, ...] = ()
    """Per block, what the engine hashed besides tokens, LoRA and salt (b"" for nothing); () when no block has any."""
    once: bool = False
    """The tier has one copy of each at most, however often it is told; otherwise each time is a further copy."""


class BlockCopied(msgspec.Struct, frozen=True, gc=False):
    """Blocks whose tokens an earlier BlockStored told, and of which `tier` now holds a copy too."""

    engine_hashes: Sequence[EngineHash] | BlockNames
    tier: Tier


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    engine_hashes: Sequence[EngineHash] | BlockNames
    tier: Tier


class WindowStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks of `block_size` tokens that are held by the layers of `group`, which look back over the last `window`
    blocks only. A prompt can go on behind a block if they hold the last `window` blocks up to there. Their tokens are
    told by a BlockStored of layers that look back over all blocks.
    """

    engine_hashes: Sequence[EngineHash] | BlockNames
    block_size: int
    group: int
    window: int
    tier: Tier = Tier.GPU


class WindowRemoved(msgspec.Struct, frozen=True, gc=False):
    engine_hashes: Sequence[EngineHash] | BlockNames
    group: int
    tier: Tier = Tier.GPU


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    pass


EngineEvent = BlockStored | BlockCopied | BlockRemoved | WindowStored | WindowRemoved | AllBlocksCleared


class EngineBatch(msgspec.Struct, frozen=True, gc=False):
    """One published message of an engine. `skipped` counts the events that are not for the index, by reason."""

    timestamp: float
    dp_rank: int | None
    events: list[EngineEvent]
    skipped: dict[str, int]
