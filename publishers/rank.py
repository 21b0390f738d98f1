"""One rank of an engine on the event plane: its batches, its replays, its load reports."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import msgspec

import engines.numbers
import indexer.handles
from engines.answers import UNDECODABLE
from engines.events import BlockStored, EngineBatch, MalformedEvent
from engines.problems import blocks_of_another_size
from engines.rank_load import RankLoad
from indexer.events import NO_EVENTS, EventBatch, LoadReport, decode_replay_request, encode
from indexer.types import Tier, WorkerRank
from publishers.logs import log_event
from publishers.plane import EventPlane, Unsubscribe, events_subject, load_subject, replay_subject
from publishers.relay import RankRelay

logger = logging.getLogger(__name__)

Decode = Callable[[bytes], EngineBatch]
"""Raises MalformedEvent."""

UNREADABLE = "A message of the engine cannot be read; further ones are only counted"
NUMBERED_ADAPTERS = "The engine's KV events name LoRA adapters by number only: use a newer version to have them found"


def warm_up() -> None:
    """Compiles what events go through: seconds the first time on a machine, during which nothing else happens."""
    engines.numbers.warm_up()
    indexer.handles.warm_up()


class Epochs:
    """Numbers that only grow: nanoseconds of the wall clock, so that they also grow from one process to the next."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 1, self._now_ns())
        return self._last


class RankPublisher:
    """Publishes what `relay` makes and what it knows; replays are answered between `start` and `close`."""

    def __init__(
        self,
        rank: WorkerRank,
        plane: EventPlane,
        namespace: str,
        epochs: Epochs,
        block_size: int | None = None,
        blocks: int | None = None,
    ) -> None:
        self.relay = RankRelay(rank, epochs.next(), block_size=block_size, blocks=blocks, secret=secrets.randbits(63))
        self._plane = plane
        self._epochs = epochs
        self._events_subject = events_subject(namespace, rank)
        self._load_subject = load_subject(namespace, rank)
        self._replay_subject = replay_subject(namespace, rank)
        self._stop_serving: Unsubscribe | None = None
        self._load = RankLoad()
        """As last reported."""
        self.has_events = True
        """False: load is all that is published."""
        self.caught_up = True
        """False: the engine may hold other blocks by now than the relay knows."""

    async def start(self, events: bool = True) -> None:
        """`events`: whether any will come."""
        if events:
            warm_up()  # takes no time when it has been done
        self._stop_serving = await self._plane.serve(self._replay_subject, self._answer)

    async def close(self) -> None:
        if self._stop_serving is not None:
            await self._stop_serving()
            self._stop_serving = None

    def publish(self, batch: EventBatch) -> None:
        """What `relay.apply` has made."""
        self._plane.publish(self._events_subject, encode(batch))

    def report(self, load: RankLoad) -> None:
        """Says which batch was the last, with the figures there are."""
        relay, self._load = self.relay, load
        epoch = relay.epoch if self.has_events else NO_EVENTS
        exact = relay.exact and self.has_events and self.caught_up
        mark = (relay.rank.worker_id, relay.rank.dp_rank, epoch, relay.event_id, exact)
        self._plane.publish(self._load_subject, encode(LoadReport(*mark, **msgspec.structs.asdict(load))))

    def disown(self) -> None:
        """Report that nobody follows the engine's events for now, so that receivers count the rank's blocks as
        uncertain until they hear more of it."""
        self.has_events = False
        self.report(RankLoad())

    def new_epoch(self) -> None:
        self.relay.restart(self._epochs.next())
        # Receivers should forget the old epoch now, not when the engine happens to store something.
        self.report(RankLoad())

    def _answer(self, payload: bytes) -> list[bytes]:
        try:
            request = decode_replay_request(payload)
        except UNDECODABLE:
            log_event(logger, logging.WARNING, "A replay request cannot be read", worker=self.relay.rank)
            return []
        return [encode(batch) for batch in self.relay.replay(request)]


class EngineRank(RankPublisher):
    """An `EventSink` that publishes. `make_decode` makes a fresh decoder for each epoch: decoders may remember.

    `block_size` is what the engine told, or an operator stated; its events show what it is. `blocks`: as for
    `RankRelay`.
    """

    def __init__(
        self,
        rank: WorkerRank,
        plane: EventPlane,
        namespace: str,
        epochs: Epochs,
        make_decode: Callable[[], Decode],
        block_size: int | None = None,
        blocks: int | None = None,
    ) -> None:
        super().__init__(rank, plane, namespace, epochs, block_size, blocks)
        self._unproven = block_size
        """None where nothing is left to be shown."""
        self._make_decode = make_decode
        self._decode = make_decode()

    def apply(self, payload: bytes, past: bool = False) -> None:
        """One message of the engine; one that cannot be read is counted. `past`: see `EventBatch`."""
        try:
            batch = self._decode(payload)
        except MalformedEvent as error:
            if not self.relay.counts.malformed:
                log_event(logger, logging.WARNING, UNREADABLE, worker=self.relay.rank, error=error)
            self.relay.malformed()
            return
        self.has_events = True  # before all are here: that there are none would be news to whoever knew the rank before
        if self._unproven is not None:
            self._prove(self._unproven, batch)
        if "lora" in batch.skipped and not self.relay.counts.skipped["lora"]:
            log_event(logger, logging.WARNING, NUMBERED_ADAPTERS, worker=self.relay.rank)
        for made in self.relay.apply(batch, past):
            self.publish(made)

    def _prove(self, block_size: int, batch: EngineBatch) -> None:
        """vLLM 0.18 to 0.22 tells the size that it was started with, not what its attention takes (MLA: 64); and each
        version one without decode context parallelism, by which it is multiplied."""
        # An event of one block may be a prompt's end within a block.
        stores = [event for event in batch.events if isinstance(event, BlockStored) and event.tier is Tier.GPU]
        sizes = {event.block_size for event in stores if len(event.engine_hashes) > 1}
        if not sizes:
            return
        self._unproven = None
        if block_size not in sizes:
            problem = blocks_of_another_size(block_size, min(sizes))
            log_event(logger, logging.WARNING, problem, worker=self.relay.rank)

    def new_epoch(self) -> None:
        self._decode = self._make_decode()
        super().new_epoch()

    def lose_track(self) -> None:
        self.relay.lose_track()

    def follow(self, caught_up: bool) -> None:
        """Its events come. Receivers hear at once when all are here, and otherwise with the next report."""
        self.has_events, self.caught_up = True, caught_up
        if caught_up:
            self.report(self._load)
