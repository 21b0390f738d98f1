"""Simulated workers with a router in front of them, in virtual time.

The workers use the scheduler and cache of the simulated engine; the router uses the real scheduling, queue and index.
Between them, HTTP and the event plane take a fixed time.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from engines.description import Role
from engines.sim.cache import CacheEvent, Cleared, Stored
from engines.sim.rank import Rank, Sink
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler as Engine
from engines.sim.store import Eviction
from engines.sim.timing import StepTiming
from indexer.assumed import AssumedPrefixes
from indexer.events import LoadReport
from indexer.hashing import SequenceHashes
from indexer.matches import Matches, MostOfMatches
from indexer.predicted import PredictedPrefixes
from indexer.prefix_index import PrefixIndex
from indexer.types import SequenceHash, Tier, WorkerRank
from router.ab.trace import Row
from router.scheduling.admission import Admission
from router.scheduling.candidates import Candidates, Split
from router.scheduling.decision import Policy
from router.scheduling.load import LoadBook
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.simulation.arrival import BOOK_EVERY, Arrival, Sample
from router.simulation.offloading import LowerTiers
from router.simulation.parts import HOP, Parts
from router.simulation.storing import SharedStore, StoringEngine
from router.simulation.timeline import Handle, Timeline

EVENT_DELAY = 0.003
"""Seconds from the end of an engine's step until its events are in the index."""
REPORT_INTERVAL = 1.0
"""Seconds between two load reports: the publishers' default."""


class FleetSettings(NamedTuple):
    """A fleet; sizes in tokens. `slow` maps a worker's number to the factor by which its steps take longer."""

    workers: int = 8
    """All workers. The first `prefill` of them only prefill, the next `decode` only decode, and the others do both."""
    prefill: int = 0
    decode: int = 0
    push: bool = False
    """Whether prefill workers send KV while they compute it, instead of decode workers fetching it afterwards."""
    transfer_gb_s: float = 50.0
    """The transfer speed for one request's KV, as in `engines.sim.settings`."""
    transfer_base_s: float = 0.005
    kv_bytes_per_token: int = 131_072
    """As in `engines.sim.timing`."""
    store_tokens: int = 0
    """The size of a store shared by all workers; 0 for none."""
    store_gb_s: float = 10.0
    """The speed of loading from the store into one worker."""
    store_base_s: float = 0.005
    """The fixed time that each load takes."""
    store_eviction: Eviction = "lru"
    store_ttl_s: float | None = None
    store_replicas: int = 1
    """Copies of each block, on different workers; every copy counts towards `store_tokens`."""
    store_credit: bool = True
    """Whether the router knows what the store holds."""
    host_tokens: int = 0
    """The size of a second tier in each worker's host memory; 0 for none."""
    host_gb_s: float = 25.0
    """The speed of loading from there: half of what PCIe 5.0 x16 (64 GB/s) does, as KV lies in many pieces."""
    host_base_s: float = 0.002
    """The fixed time that each load takes."""
    disk_tokens: int = 0
    """The size of a third tier on each worker's disk, for what leaves the host's memory; 0 for none."""
    disk_gb_s: float = 3.0
    """The speed of loading from there: half of what one NVMe disk on PCIe 4.0 x4 reads at best."""
    disk_base_s: float = 0.005
    """The fixed time that each load takes."""
    kv_events: bool = True
    """Whether the router hears of what the workers cache; otherwise it assumes that from what it sends them."""
    cache_tokens: int = 262_144
    block_size: int = 16
    slow: Mapping[int, float] = {}
    timing: StepTiming = StepTiming()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_loras: int | None = None
    """LoRA adapters that each worker runs at once; None: any number."""

    @property
    def cache_blocks(self) -> int:
        return self.cache_tokens // self.block_size

    def role(self, number: int) -> Role:
        if number < self.prefill:
            return "prefill"
        return "decode" if number < self.prefill + self.decode else "both"

    def transfer_seconds(self, tokens: int) -> float:
        """The time to transfer the KV of `tokens`, without `transfer_base_s`."""
        return tokens * self.kv_bytes_per_token / (self.transfer_gb_s * 1e9)


class VirtualFleet:
    """Simulates the requests of a trace under a policy. A fleet serves one run."""

    def __init__(
        self,
        settings: FleetSettings,
        policy: Policy,
        seed: int = 0,
        admission: Admission = Admission(),  # noqa: B008 -- changes nothing in itself
    ) -> None:
        self.settings = settings
        self.timeline = Timeline()
        self.index = PrefixIndex()
        self.predicted = PredictedPrefixes()
        self.assumed = None if settings.kv_events else AssumedPrefixes(self.index, math.inf)
        self.samples: list[Sample] = []
        self.scheduler = Scheduler(policy, LoadBook(), random.Random(seed))  # noqa: S311 -- not for secrets
        self.queue = Queue(self.scheduler, admission, self.timeline.now, self.timeline.call_later)
        self.ranks: list[WorkerRank] = []
        """All workers that ever joined, in that order."""
        self.numbers: dict[WorkerRank, int] = {}
        self.workers: dict[WorkerRank, Rank] = {}
        """Workers that have not been killed."""
        self.open: list[WorkerRank] = []
        """Workers that may be sent requests."""
        self._sent: dict[WorkerRank, dict[Arrival, None]] = {}
        """The requests at each worker that the router has not noticed to be lost."""
        self.fetching: dict[Request, Parts] = {}
        """Requests that wait for their prompt's KV from a prefill worker."""
        self.shared = SharedStore(self) if settings.store_tokens else None
        self.below = self.shared or (LowerTiers(self) if settings.host_tokens else None)
        """Where workers load what their caches lack."""
        self.gaps: Counter[float] = Counter()
        """The `token_gaps` of workers that were killed."""
        self._rows_left = self._in_flight = 0
        self.join(settings.workers)

    # -- the fleet changes

    def join(self, count: int) -> None:
        """Adds `count` workers with empty caches."""
        for number in range(len(self.ranks), len(self.ranks) + count):
            rank = WorkerRank(f"worker-{number:04}", 0)
            self.ranks.append(rank)
            self.numbers[rank], self._sent[rank] = number, {}
            self.workers[rank] = self._worker(number, rank)
            self.open.append(rank)
            if self.assumed is not None:
                self.assumed.resize(rank, self.settings.cache_blocks)
        self._open_changed()

    def drain(self, number: int) -> None:
        """Sends no further requests to a worker."""
        rank = self.ranks[number]
        if rank in self.open:
            self.open.remove(rank)
            self._open_changed()

    def kill(self, number: int) -> None:
        """Ends a worker at once; the router notices when the connections break."""
        rank = self.ranks[number]
        worker = self.workers.pop(rank, None)
        if worker:
            worker.close()
            self.gaps += worker.scheduler.gaps
            if self.below:
                self.below.lose(rank)
            self.timeline.call_later(HOP, self._lose, number)

    def _lose(self, number: int) -> None:
        rank = self.ranks[number]
        self.drain(number)
        self.index.clear(rank)
        self.predicted.forget(rank)
        if self.assumed is not None:
            self.assumed.forget(rank)
        self.scheduler.forget(rank)
        for arrival in list(self._sent.pop(rank)):
            arrival.lose(rank)
        self.queue.wake()

    def slow_down(self, number: int, factor: float) -> None:
        """Makes a worker's steps, from the next one on, `factor` times as long."""
        worker = self.workers.get(self.ranks[number])
        if worker:
            worker.scheduler.slowdown = factor

    def _open_changed(self) -> None:
        size, role = self.settings.block_size, self.settings.role
        ranks: dict[Role, list[tuple[WorkerRank, int]]] = {"prefill": [], "decode": [], "both": []}
        for rank in self.open:
            ranks[role(self.numbers[rank])].append((rank, size))
        self.candidates = Candidates(ranks["both"], self._split(ranks["prefill"], ranks["decode"] + ranks["both"]))

    def split_of(self, prefill: WorkerRank) -> Split | None:
        """The workers that may decode what `prefill` computes, even if it drains: those that drain only if there are
        no others."""
        split = self.candidates.split
        if split is not None and prefill in split.prefills.ranks:
            return split
        size, role = self.settings.block_size, self.settings.role
        decodes = [(rank, size) for rank in self._sent if role(self.numbers[rank]) != "prefill"]
        return self._split([(prefill, size)], [one for one in decodes if one[0] in self.open] or decodes)

    def _split(self, prefill: list[tuple[WorkerRank, int]], decode: list[tuple[WorkerRank, int]]) -> Split | None:
        if not prefill or not decode:
            return None
        decodes, near, count = Candidates(decode), np.zeros(len(decode), np.bool_), len(prefill)
        return Split(Candidates(prefill), (decodes,) * count, (near,) * count, (self.settings.push,) * count)

    def _worker(self, number: int, rank: WorkerRank) -> Rank:
        settings = self.settings
        kind = partial(StoringEngine, self, self.below, rank) if self.below else Engine
        engine = kind(
            cache_blocks=settings.cache_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            timing=settings.timing,
            answers=range(1, 1 << 20),
            emit_every=BOOK_EVERY,
            max_loras=settings.max_loras,
        )
        engine.slowdown = settings.slow.get(number, 1.0)
        self.scheduler.watch(rank, settings.block_size)
        return Rank(engine, self.timeline, self.timeline, lambda events: self._publish(rank, events), self._fetch)

    def _fetch(self, request: Request, tokens: int) -> None:
        parts = self.fetching.pop(request, None)
        if parts:
            parts.fetch(tokens)

    # -- a run

    def run(
        self,
        rows: Sequence[Row],
        during: Callable[[VirtualFleet], None] | None = None,
        enough: Callable[[Sequence[Sample]], bool] | None = None,
    ) -> list[Sample]:
        """Runs all of `rows`, or stops earlier once the samples so far are `enough`. Returns samples in the order in
        which requests ended. `during` may schedule changes of the fleet."""
        self._rows_left = len(rows)
        for index, row in enumerate(rows):
            self.timeline.call_at(row.timestamp / 1000, self._arrive, index, row)
        self._report()
        if during:
            during(self)
        while (self._rows_left or self._in_flight) and not (enough and enough(self.samples)):
            self.timeline.run(self.timeline.now() + REPORT_INTERVAL)
        return self.samples

    def _arrive(self, index: int, row: Row) -> None:
        self._rows_left -= 1
        self._in_flight += 1
        self.queue.submit(Arrival(self, index, row))

    def deliver(self, rank: WorkerRank, request: Request, arrival: Arrival, sink: Sink) -> Handle:
        """Sends a request to a worker. What is returned can be cancelled while it is on its way."""
        self._sent.get(rank, {})[arrival] = None
        return self.timeline.call_later(HOP, self._reach, rank, request, sink)

    def _reach(self, rank: WorkerRank, request: Request, sink: Sink) -> None:
        worker = self.workers.get(rank)
        if worker:  # otherwise it is lost with the worker
            worker.submit(request, sink)

    def expect(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """Says that a worker was sent a prompt with these hashes."""
        if self.assumed is not None:
            self.assumed.assume(rank, hashes, self.timeline.now())
        else:
            self.predicted.store(rank, hashes, self.timeline.now())

    def matches(self, hashes: SequenceHashes) -> Matches:
        """What the router believes that the workers hold of a prompt."""
        self.predicted.expire(self.timeline.now())
        known, predicted = self.index.find_matches(hashes), self.predicted.find_matches(hashes)
        return MostOfMatches(known, predicted) if predicted else known

    def leave(self, rank: WorkerRank, arrival: Arrival) -> None:
        """Says that a request needs nothing more of a worker, so that it is not affected by its loss."""
        self._sent.get(rank, {}).pop(arrival, None)

    def end(self, sample: Sample) -> None:
        self._in_flight -= 1
        self.samples.append(sample)

    @property
    def token_gaps(self) -> Counter[float]:
        """How many tokens came after each interval since the token before (in seconds), over all streams."""
        return sum((worker.scheduler.gaps for worker in self.workers.values()), self.gaps)

    def _publish(self, rank: WorkerRank, events: list[CacheEvent]) -> None:
        if self.settings.kv_events:
            self.timeline.call_later(EVENT_DELAY, self._apply, rank, events)

    def _apply(self, rank: WorkerRank, events: list[CacheEvent]) -> None:
        if rank not in self.workers:
            return
        for event in events:
            if isinstance(event, Cleared):
                self.index.clear(rank)
            elif isinstance(event, Stored):
                self.index.store(rank, Tier.GPU, np.array(event.hashes, np.uint64))
            else:
                self.index.remove(rank, Tier.GPU, np.array(event.hashes, np.uint64))

    def tell_of_tier(
        self, rank: WorkerRank, tier: Tier, stored: Sequence[SequenceHash], removed: Sequence[SequenceHash]
    ) -> None:
        """Says what came into a tier of a worker's below its GPU, and what went."""
        if self.settings.kv_events:
            self.timeline.call_later(EVENT_DELAY, self._apply_tier, rank, tier, stored, removed)

    def _apply_tier(
        self, rank: WorkerRank, tier: Tier, stored: Sequence[SequenceHash], removed: Sequence[SequenceHash]
    ) -> None:
        if rank in self.workers:
            self.index.store(rank, tier, np.array(stored, np.uint64))
            self.index.remove(rank, tier, np.array(removed, np.uint64))

    def _report(self) -> None:
        now = self.timeline.now()
        for rank, worker in self.workers.items():
            self.scheduler.book.on_report(_report_of(rank, worker.scheduler), now)
        if self._rows_left or self._in_flight:
            self.timeline.call_later(REPORT_INTERVAL, self._report)


def _report_of(rank: WorkerRank, engine: Engine) -> LoadReport:
    cache = engine.cache
    return LoadReport(
        rank.worker_id,
        rank.dp_rank,
        0,
        -1,
        exact=True,
        num_requests_waiting=len(engine.waiting),
        request_active_slots=len(engine.running),
        request_total_slots=engine.max_num_seqs,
        kv_active_blocks=cache.capacity - cache.free_blocks,
        kv_total_blocks=cache.capacity,
        lora_total_slots=engine.max_loras,
    )
