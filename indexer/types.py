"""Types that every layer shares."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

SequenceHash: TypeAlias = int
"""The router's own hash: unsigned 64 bit, chained over all blocks from the start of the prompt (`indexer.hashing`)."""

EngineHash: TypeAlias = int | bytes
"""The engine's hash of a block: opaque, only compared for equality."""


class Tier(enum.IntEnum):
    """Where a worker holds a block, the fastest first."""

    GPU = 0
    CPU = 1
    DISK = 2


class WorkerRank(NamedTuple):
    """The unit of choice: one data-parallel rank of one worker."""

    worker_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.worker_id}#{self.dp_rank}"


class RankSet:
    """Some ranks in a fixed order. Compared by identity, so that positions can be remembered per set."""

    def __init__(self, ranks: Iterable[WorkerRank]) -> None:
        self.ranks: Final = tuple(ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<RankSet of {len(self)}>"


class Namespace(NamedTuple):
    """What separates equal tokens: a LoRA adapter's name and the request's `cache_salt`."""

    lora_name: str | None = None
    cache_salt: str | None = None


PLAIN = Namespace()
