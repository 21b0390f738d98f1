"""A simulated fleet whose index hears it through cursors, and is audited; with faults that nobody announces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from engines.sim.cache import CacheEvent, Cleared, Stored
from indexer import events
from indexer.events import EventBatch, LoadReport, ReplayRequest, pack_hashes
from indexer.kv_indexer import KVIndexer, PromptHashes
from indexer.matches import Matches
from indexer.types import Tier, WorkerRank
from router.events.index_audit import Claim, IndexAudit
from router.proxy.outcome import Outcome
from router.scheduling.booking import Booking
from router.scheduling.decision import Decision, Policy
from router.simulation.arrival import Arrival, Fate
from router.simulation.fleet import EVENT_DELAY, FleetSettings, VirtualFleet


class SimPublisher:
    """One rank's: what it was told that its engine holds, every batch that it made, and what becomes of them."""

    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank
        self.loses: Callable[[], bool] = lambda: False
        """Whether the next event is left out, of which nobody is told."""
        self.seed = 0
        """Not 0: hashes that nobody else makes."""
        self.answers = True
        self.batches: list[EventBatch] = []
        self._copies: Counter[int] = Counter()

    def make(self, told: list[CacheEvent]) -> EventBatch | None:
        made = [event for one in told if (event := self._make(one)) is not None]
        if not made:
            return None
        sent = [event for event in made if not self.loses()]
        self.batches.append(EventBatch(*self.rank, 1, len(self.batches), sent))
        return self.batches[-1]

    def report(self) -> LoadReport:
        return LoadReport(*self.rank, 1, len(self.batches) - 1, exact=True)

    def replay(self, request: ReplayRequest) -> list[EventBatch]:
        if not self.answers:
            return []
        if request.epoch == 1:
            return self.batches[request.event_id :]
        held = events.Stored(Tier.GPU, self._pack([h for h, copies in self._copies.items() if copies > 0]))
        return [EventBatch(*self.rank, 1, len(self.batches) - 1, [held], 0, 1)]

    def _make(self, event: CacheEvent) -> events.Event | None:
        if isinstance(event, Cleared):
            self._copies.clear()
            return events.Cleared()
        if isinstance(event, Stored):
            self._copies.update(event.hashes)
            return events.Stored(Tier.GPU, self._pack(event.hashes))
        self._copies.subtract(h for h in event.hashes if self._copies[h] > 0)
        gone = [h for h in event.hashes if self._copies[h] <= 0]
        return events.Removed(Tier.GPU, self._pack(gone)) if gone else None

    @property
    def held(self) -> set[int]:
        return {h ^ self.seed for h, copies in self._copies.items() if copies > 0}

    def _pack(self, hashes: list[int]) -> bytes:
        return pack_hashes(np.array(hashes, np.uint64) ^ np.uint64(self.seed))


class AuditedFleet(VirtualFleet):
    def __init__(self, settings: FleetSettings, policy: Policy) -> None:
        self.publishers: dict[WorkerRank, SimPublisher] = {}
        super().__init__(settings, policy)
        self.indexer = KVIndexer()
        self.index, self.predicted = self.indexer.index, self.indexer._predicted
        self.audit = IndexAudit(self.indexer, self._ask_anew, has_store=False)
        self.asked: list[WorkerRank] = []
        """Whom for everything."""
        self.worst = 0.0
        """Drift of any rank."""
        for rank in self.ranks:
            self.publishers[rank] = SimPublisher(rank)
            self.indexer.watch(rank)

    def forget_silently(self, rank: WorkerRank) -> None:
        """Its engine starts anew, as soon as it has nothing to do, and nobody hears of it."""
        cache = self.workers[rank].scheduler.cache
        if cache.clear():
            cache.take_events()
        else:
            self.timeline.call_later(0.01, self.forget_silently, rank)

    def _arrive(self, index: int, row: object) -> None:
        self._rows_left -= 1
        self._in_flight += 1
        self.queue.submit(AuditedArrival(self, index, row))  # type: ignore[arg-type] # as the base's

    def _publish(self, rank: WorkerRank, told: list[CacheEvent]) -> None:
        batch = self.publishers[rank].make(told)
        if batch:
            self.timeline.call_later(EVENT_DELAY, self._hear, batch)

    def _hear(self, batch: EventBatch) -> None:
        self._answer(self.indexer.on_batch(batch))

    def _ask_anew(self, rank: WorkerRank) -> None:
        self.asked.append(rank)
        self._answer(self.indexer.ask_anew(rank))

    def _answer(self, requests: list[ReplayRequest]) -> None:
        for request in requests:
            self.timeline.call_later(EVENT_DELAY, self._replay, WorkerRank(request.worker_id, request.dp_rank), request)

    def _replay(self, rank: WorkerRank, request: ReplayRequest) -> None:
        for batch in self.publishers[rank].replay(request):
            self._answer(self.indexer.on_batch(batch))
        self._answer(self.indexer.on_replay_end(rank))

    def _report(self) -> None:
        super()._report()
        for publisher in self.publishers.values():
            self._answer(self.indexer.on_report(publisher.report()))
        self.indexer.on_tick(connected=True)
        self.audit.tick(self.timeline.now())
        self.worst = max([self.worst, *(drift.ratio for drift in self.audit._drifts.values() if drift.requests > 50)])


class AuditedArrival(Arrival):
    _fleet: AuditedFleet

    def matches(self) -> Matches:
        self._found = super().matches()
        return self._found

    def send(self, decision: Decision, booking: Booking) -> None:
        fleet = self._fleet
        prompt = PromptHashes(self.prompt_tokens, {fleet.settings.block_size: self._hashes})
        self._claim: Claim | None = fleet.audit.claim(decision, self._found, prompt, fleet.timeline.now())
        super().send(decision, booking)

    def _end(self, fate: Fate) -> None:
        if self._claim and self._request:
            now, cached = self._fleet.timeline.now(), self._request.cached_tokens
            outcome = Outcome(None, 200, "complete", None, 0.0, self.prompt_tokens, cached)
            self._fleet.audit.finished(self._claim, outcome, now)
        super()._end(fate)
