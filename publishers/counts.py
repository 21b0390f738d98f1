"""What a publisher counts of each rank, from its sockets to the event plane."""

from __future__ import annotations

from collections import Counter

import msgspec


class SourceCounts(msgspec.Struct):
    """Totals since the source was made."""

    messages: int = 0
    connections: int = 0
    replays: int = 0
    replayed: int = 0
    lost_track: int = 0
    """Times that messages were missing for good."""
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    """Messages that are not what the protocol says, by what is wrong."""


class RelayCounts(msgspec.Struct):
    """Totals since the relay was made."""

    batches: int = 0
    """Batches made for the event plane."""
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    orphans: int = 0
    """Stores dropped because their parent is unknown."""
    malformed: int = 0
    """Frames and events that could not be read; of a `KVPublisher` also figures that are none."""
    epochs: int = 0
    """Restarts."""
    snapshots: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    """Events that are none of the index's business, by reason."""
