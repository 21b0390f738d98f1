"""Workers that share a store of KV, as vLLM's with MooncakeStoreConnector: what one computed, any other may load.

At its admission a request takes the leading blocks that its worker holds, and loads what the store has beyond them,
whether that is faster than computing them or not; others are computed meanwhile. A worker makes its loads one by one.
When a request has its first token, its prompt's full blocks are put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from engines.sim.request import Request
from engines.sim.scheduler import Scheduler as Engine
from engines.sim.scheduler import StepOutcome
from engines.sim.store import Store
from indexer.types import WorkerRank

if TYPE_CHECKING:
    from router.simulation.fleet import VirtualFleet

PUT_DELAY: Final = 0.01
"""Seconds from a prompt's first token to its blocks' being in the store."""


class SharedStore:
    """Of one virtual fleet."""

    def __init__(self, fleet: VirtualFleet) -> None:
        settings = fleet.settings
        self._fleet = fleet
        self._size = settings.block_size
        self.store = Store(settings.store_tokens // self._size, settings.store_eviction, settings.store_ttl_s)
        self.loaded_tokens: dict[Request, int] = {}
        """Of prompts under way, those that came from the store."""
        self._free_at: dict[WorkerRank, float] = {}
        """When a worker's loads so far will be done."""

    def tokens(self, hashes: Sequence[int]) -> int:
        """How many leading ones are here now."""
        return self.store.prefix(hashes, self._fleet.timeline.now()) * self._size

    @property
    def changes(self) -> int | None:
        """Grows whenever what is here changes; None where it does so by itself."""
        done = self.store.counters
        expires = self._fleet.settings.store_ttl_s is not None
        return None if expires else done.stored + done.evicted + done.lost

    def lose(self, rank: WorkerRank) -> None:
        """Its memory was a part of the store."""
        self.store.fail(rank)
        self._free_at.pop(rank, None)

    def begin(self, rank: WorkerRank, request: Request) -> bool:
        """Load what the worker lacks, if there is any; its last token is computed in any case."""
        now, settings = self._fleet.timeline.now(), self._fleet.settings
        wanted = request.hashes[: (request.prompt_length - 1) // self._size]
        there = self.store.take(wanted, now, len(request.blocks)) * self._size
        if there <= request.computed:
            return False
        size = (there - request.computed) * settings.kv_bytes_per_token
        done = max(now, self._free_at.get(rank, 0.0)) + settings.store_base_s + size / (settings.store_gb_s * 1e9)
        self._free_at[rank] = done
        self._fleet.timeline.call_at(done, self._loaded, rank, request, there, self.store.counters.lost)
        return True

    def _loaded(self, rank: WorkerRank, request: Request, there: int, lost: int) -> None:
        worker = self._fleet.workers.get(rank)
        if not worker or worker.scheduler.loading.get(request.request_id) is not request:
            return
        if lost != self.store.counters.lost:  # an owner has failed meanwhile, and what it had is computed
            there = min(there, self.tokens(request.hashes))
        own = request.computed
        self.loaded_tokens[request] = max(0, there - own)
        worker.loaded(request.request_id, there)

    def put_later(self, rank: WorkerRank, request: Request, at: float) -> None:
        hashes = request.hashes[: request.prompt_length // self._size]
        self._fleet.timeline.call_at(at + PUT_DELAY, self._put, rank, hashes)

    def _put(self, rank: WorkerRank, hashes: Sequence[int]) -> None:
        """With its copies, as an engine's client puts them."""
        if rank not in self._fleet.workers:
            return
        now = self._fleet.timeline.now()
        put = self.store.put(hashes, rank, now)
        for owner in self._others(rank):
            for key in put:
                self.store.copy(key, owner, now)

    def _others(self, rank: WorkerRank) -> list[WorkerRank]:
        """Who has copies of what `rank` puts: the next of those that live."""
        ranks = list(self._fleet.workers)
        at, count = ranks.index(rank), min(self._fleet.settings.store_replicas, len(ranks))
        return [ranks[(at + step) % len(ranks)] for step in range(1, count)]


class StoringEngine(Engine):
    """A worker's scheduler. Its `remote` requests load from the store, but for those whose KV another worker sends."""

    def __init__(self, fleet: VirtualFleet, shared: SharedStore, rank: WorkerRank, **settings: Any) -> None:
        super().__init__(**settings)
        self._fleet = fleet
        self._shared = shared
        self._rank = rank

    def step(self, now: float) -> StepOutcome:
        outcome = super().step(now)
        for request, position in outcome.emitted:
            if position == 0:
                self._shared.put_later(self._rank, request, now + outcome.duration)
        return outcome

    def _load(self, request: Request) -> int:
        """Where the store has nothing more, it is computed in this very step."""
        if request in self._fleet.fetching or self._shared.begin(self._rank, request):
            return super()._load(request)
        return 0
