"""One engine rank's events as the event plane carries them: hashed, numbered, kept for replay.

The relay knows everything that its engine holds, so it can always answer with a snapshot, however long ago its ring
begins. Pure: the epoch comes from the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from engines.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    WindowRemoved,
    WindowStored,
)
from indexer.events import Cleared, Event, EventBatch, Removed, ReplayRequest, Stored, pack_hashes
from indexer.handles import BlockHandles, UnknownParent
from indexer.hashing import SequenceHashes, root_hash
from indexer.kernels import NO_SECRET
from indexer.types import Tier, WorkerRank
from publishers.counts import RelayCounts
from publishers.windows import WindowBlocks

RING_SIZE = 4096
"""Batches kept for replay; an engine makes at most one a step, so a minute or more."""

SNAPSHOT_PART = 2_500
"""Hashes in one message: 20 kB, and 55 kB where each is an event of its own. NATS takes 1 MiB, but some servers are
told to take 64 kB only."""

_HASH_BYTES = 8
_NOTHING = np.zeros(0, np.uint64)


class RankRelay:
    """Turns the events of `rank` into batches of `epoch`; `event_id` is the last batch's, −1 before the first.

    `exact` is False while the view may differ from what the engine holds: stores were dropped for an unknown parent, a
    frame could not be read, or (`lose_track`) events are missing; until the engine clears its cache or restarts.
    `block_size` is what prompts are cut into to be looked up, and `blocks` how many the engine has room for; None where
    that is not known.
    """

    def __init__(
        self,
        rank: WorkerRank,
        epoch: int,
        ring_size: int = RING_SIZE,
        block_size: int | None = None,
        blocks: int | None = None,
        secret: int = NO_SECRET,
    ) -> None:
        """`secret`: see `BlockHandles`."""
        self.rank = rank
        self.epoch = epoch
        self.event_id = -1
        self.exact = True
        self.counts = RelayCounts()
        self._block_size = block_size
        self._secret = secret
        self._handles = BlockHandles(blocks or 0, secret)
        self._windows = WindowBlocks(secret)
        self._size = 0
        """Tokens in a block: the most in any that was stored, as what ends within a block has fewer."""
        self._ring: deque[EventBatch] = deque(maxlen=ring_size)

    def __len__(self) -> int:
        """Blocks held, whatever the tier."""
        return len(self._handles)

    def apply(self, batch: EngineBatch, past: bool = False) -> list[EventBatch]:
        """The batches to publish: none when nothing changed for a receiver, several when one would be too large.
        `past`: see `EventBatch`."""
        for reason, count in batch.skipped.items():
            self._skip(reason, count)
        events: list[Event] = []
        for event in _windows_last(batch.events):
            self._apply(event, events)
        if not events:
            return []
        merged = _merge(events)
        return [self._number(part, past) for part in ([merged] if _fits(merged) else _split(merged))]

    def restart(self, epoch: int) -> None:
        """Begin `epoch`, greater than the one before, with an empty cache. Publishes nothing by itself."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not greater than {self.epoch}")
        self.epoch = epoch
        self.event_id = -1
        self.exact = True
        self.counts.epochs += 1
        self._handles.clear()
        self._windows = WindowBlocks(self._secret)
        self._size = 0
        self._ring.clear()

    def lose_track(self) -> None:
        """Events of the engine are missing for good."""
        self.exact = False

    def malformed(self) -> None:
        """A frame could not be read, so whatever it said is missing."""
        self.counts.malformed += 1
        self.lose_track()

    def replay(self, request: ReplayRequest) -> list[EventBatch]:
        """The batches from `request.event_id` on if all are still there (none, if none is missing), else a snapshot."""
        wanted = request.event_id
        if request.epoch == self.epoch and self.event_id - len(self._ring) < wanted <= self.event_id + 1:
            return [batch for batch in self._ring if batch.event_id >= wanted]
        self.counts.snapshots += 1
        return self.snapshot()

    def snapshot(self) -> list[EventBatch]:
        """Everything held, in parts that carry the id of the last batch they include (−1: none yet)."""
        held: list[Event] = [Stored(tier, pack_hashes(hashes)) for tier, hashes in self._handles.held().items()]
        held += [Stored(Tier.GPU, pack_hashes(self._windows.held(window)), window) for window in self._windows.windows]
        parts = _split(held)
        return [self._batch(part, number, len(parts)) for number, part in enumerate(parts)]

    def _skip(self, reason: str, count: int) -> None:
        self.counts.skipped[reason] += count
        if reason == "malformed":
            self.counts.malformed += count
            self.lose_track()

    def _apply(self, event: EngineEvent, out: list[Event]) -> None:
        if isinstance(event, BlockStored):
            if len(hashes := self._store(event)):
                out.append(Stored(event.tier, pack_hashes(hashes)))
        elif isinstance(event, BlockCopied):
            if len(hashes := self._copy(event)):
                out.append(Stored(event.tier, pack_hashes(hashes)))
        elif isinstance(event, BlockRemoved):
            if len(hashes := self._remove(event)):
                out.append(Removed(event.tier, pack_hashes(hashes)))
        elif isinstance(event, WindowStored):
            self._store_window(event, out)
        elif isinstance(event, WindowRemoved):
            self._remove_window(event, out)
        else:
            self._clear(out)

    def _store(self, event: BlockStored) -> SequenceHashes:
        root = root_hash(event.namespace)
        try:
            hashes = self._handles.store(
                event.tier,
                event.engine_hashes,
                event.parent,
                event.token_ids,
                event.block_size,
                root,
                event.extras,
                event.once,
            )
        except UnknownParent:
            if event.block_size != (self._block_size or max(self._size, event.block_size)):
                # A prompt's end within a block, which vLLM names by where it ends and by what precedes that within the
                # block (since 0.28: BlockPool.cache_partial_block). Nobody looks for it, and nothing is missing.
                self._skip("block_size", 1)
                return _NOTHING
            self.counts.orphans += 1
            self.lose_track()
            return _NOTHING
        except (ValueError, OverflowError, TypeError):
            self.malformed()
            return _NOTHING
        self._size = max(self._size, event.block_size)
        self.counts.stored += len(hashes)
        return hashes

    def _copy(self, event: BlockCopied) -> SequenceHashes:
        names, known = self._handles.find(event.engine_hashes)
        if unknown := len(event.engine_hashes) - len(names):
            self._skip("tokens", unknown)
        hashes = self._handles.adopt(event.tier, names, known)
        self.counts.stored += len(hashes)
        return hashes

    def _store_window(self, event: WindowStored, out: list[Event]) -> None:
        # Neither blocks of another size than those that prompts are looked up in, nor a group that becomes another.
        if event.block_size != self._size or self._windows.window_of(event.group) not in (None, event.window):
            self._skip("group", 1)
            return
        if len(lost := self._windows.welcome(event.group, event.window)):
            out.append(Removed(Tier.GPU, pack_hashes(lost), event.window))
        hashes = self._windows.store(event.group, event.tier, *self._handles.find(event.engine_hashes))
        out.append(Stored(Tier.GPU, pack_hashes(hashes), event.window))

    def _remove_window(self, event: WindowRemoved, out: list[Event]) -> None:
        window, hashes = self._windows.remove(event.group, event.tier, event.engine_hashes)
        if len(hashes):
            out.append(Removed(Tier.GPU, pack_hashes(hashes), window))

    def _remove(self, event: BlockRemoved) -> SequenceHashes:
        hashes = self._handles.remove(event.tier, event.engine_hashes)
        self.counts.removed += len(hashes)
        return hashes

    def _clear(self, out: list[Event]) -> None:
        self.exact = True
        self._windows.empty()
        # Of layers with windows blocks may be left when all others are evicted.
        if len(self._handles) or self._windows.windows:
            self._handles.clear()
            self.counts.cleared += 1
            out.append(Cleared())
            out += [Stored(Tier.GPU, b"", window) for window in self._windows.windows]

    def _number(self, events: list[Event], past: bool) -> EventBatch:
        self.event_id += 1
        self.counts.batches += 1
        batch = self._batch(events, past=past)
        self._ring.append(batch)
        return batch

    def _batch(self, events: list[Event], part: int = 0, parts: int = 0, past: bool = False) -> EventBatch:
        worker, rank = self.rank
        return EventBatch(worker, rank, self.epoch, self.event_id, events, part, parts, past=past)


def _windows_last(events: list[EngineEvent]) -> list[EngineEvent]:
    """In one step's events, blocks of a group with a window may come before those that say what is in them."""
    if not any(isinstance(event, WindowStored | WindowRemoved) for event in events):
        return events
    ordered: list[EngineEvent] = []
    last: list[EngineEvent] = []
    for event in events:
        if isinstance(event, WindowStored | WindowRemoved):
            last.append(event)
        else:
            if isinstance(event, AllBlocksCleared):
                ordered += last
                last = []
            ordered.append(event)
    return ordered + last


def _merge(events: list[Event]) -> list[Event]:
    """Neighbours of one kind, tier and window as one event: an engine makes one for each request of a step."""
    merged: list[Event] = []
    parts: list[bytes] = []
    for event, following in zip(events, [*events[1:], None], strict=True):
        if isinstance(event, Cleared):
            merged.append(event)
            continue
        parts.append(event.hashes)
        if type(following) is not type(event) or following.tier is not event.tier or following.window != event.window:
            merged.append(type(event)(event.tier, b"".join(parts), event.window))
            parts.clear()
    return merged


def _fits(events: list[Event]) -> bool:
    """Whether one message takes them: nearly always."""
    room = SNAPSHOT_PART
    for event in events:
        room -= _size(event)
    return room >= 0


def _size(event: Event) -> int:
    """In hashes."""
    return 0 if isinstance(event, Cleared) else len(event.hashes) // _HASH_BYTES


def _split(events: list[Event]) -> list[list[Event]]:
    """All of them in their order, in lists that fit."""
    lists: list[list[Event]] = [[]]
    room = SNAPSHOT_PART
    for event in events:
        for piece in _pieces(event):
            size = _size(piece)
            if size > room:
                lists.append([])
                room = SNAPSHOT_PART
            lists[-1].append(piece)
            room -= size
    return lists


def _pieces(event: Event) -> Iterator[Event]:
    if isinstance(event, Cleared):
        yield event
        return
    step = SNAPSHOT_PART * _HASH_BYTES
    for start in range(0, max(1, len(event.hashes)), step):
        yield type(event)(event.tier, event.hashes[start : start + step], event.window)
