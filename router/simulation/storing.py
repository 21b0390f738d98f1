"""Simulated workers that share a KV store, as vLLM's do with MooncakeStoreConnector.

An admitted request uses the leading blocks that its worker holds, and loads the further ones that the store has, even
if computing them would be faster. Other requests are computed meanwhile. A worker loads for one request at a time.
When a request has its first token, the full blocks of its prompt are put into the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from engines.sim.request import Request
from engines.sim.scheduler import Scheduler as Engine
from engines.sim.scheduler import StepOutcome
from engines.sim.store import Store
from indexer.types import WorkerRank
from router.simulation.load_lines import LoadLines
from router.simulation.offloading import LowerTiers

if TYPE_CHECKING:
    from router.simulation.fleet import VirtualFleet

PUT_DELAY: Final = 0.01
"""Seconds from the first token until the prompt's blocks are in the store."""


class SharedStore:
    """The store of one simulated fleet."""

    def __init__(self, fleet: VirtualFleet) -> None:
        settings = fleet.settings
        self._fleet = fleet
        self._size = settings.block_size
        self.store = Store(settings.store_tokens // self._size, settings.store_eviction, settings.store_ttl_s)
        self.loaded_tokens: dict[Request, int] = {}
        """Tokens loaded from the store, by running request."""
        self._lines = LoadLines()

    def tokens(self, hashes: Sequence[int]) -> int:
        """How many leading tokens of a prompt with these block hashes the store has now."""
        return self.store.prefix(hashes, self._fleet.timeline.now()) * self._size

    @property
    def changes(self) -> int | None:
        """A number that grows with every change of the content; None where blocks expire, at any time."""
        done = self.store.counters
        expires = self._fleet.settings.store_ttl_s is not None
        return None if expires else done.stored + done.evicted + done.lost

    def lose(self, rank: WorkerRank) -> None:
        """Drops what the store held in the memory of a lost worker."""
        self.store.fail(rank)
        self._lines.lose(rank)

    def begin(self, rank: WorkerRank, request: Request) -> bool:
        """Starts to load the blocks that the store has and the worker lacks; returns whether there are any. The last
        token of the prompt is always computed."""
        now, settings = self._fleet.timeline.now(), self._fleet.settings
        wanted = request.hashes[: (request.prompt_length - 1) // self._size]
        there = self.store.take(wanted, now, len(request.blocks)) * self._size
        if there <= request.computed:
            return False
        size = (there - request.computed) * settings.kv_bytes_per_token
        done = self._lines.add(rank, now, settings.store_base_s + size / (settings.store_gb_s * 1e9))
        self._fleet.timeline.call_at(done, self._loaded, rank, request, there, self.store.counters.lost)
        return True

    def _loaded(self, rank: WorkerRank, request: Request, there: int, lost: int) -> None:
        worker = self._fleet.workers.get(rank)
        if not worker or worker.scheduler.loading.get(request.request_id) is not request:
            return
        if lost != self.store.counters.lost:  # a worker was lost meanwhile, and its part of the store with it
            there = min(there, self.tokens(request.hashes))
        own = request.computed
        self.loaded_tokens[request] = max(0, there - own)
        worker.loaded(request.request_id, there)

    def put_later(self, rank: WorkerRank, request: Request, at: float) -> None:
        hashes = request.hashes[: request.prompt_length // self._size]
        self._fleet.timeline.call_at(at + PUT_DELAY, self._put, rank, hashes)

    def _put(self, rank: WorkerRank, hashes: Sequence[int]) -> None:
        """Puts blocks and their copies, as an engine's store client does."""
        if rank not in self._fleet.workers:
            return
        now = self._fleet.timeline.now()
        put = self.store.put(hashes, rank, now)
        for owner in self._others(rank):
            for key in put:
                self.store.copy(key, owner, now)

    def _others(self, rank: WorkerRank) -> list[WorkerRank]:
        """The workers that get copies of what `rank` puts: the next live ones."""
        ranks = list(self._fleet.workers)
        at, count = ranks.index(rank), min(self._fleet.settings.store_replicas, len(ranks))
        return [ranks[(at + step) % len(ranks)] for step in range(1, count)]


class StoringEngine(Engine):
    """A worker's scheduler. `remote` requests load from the store or from lower tiers, except those whose KV a prefill
    worker sends."""

    def __init__(self, fleet: VirtualFleet, below: SharedStore | LowerTiers, rank: WorkerRank, **settings: Any) -> None:
        super().__init__(**settings)
        self._fleet = fleet
        self._below = below
        self._rank = rank

    def step(self, now: float) -> StepOutcome:
        outcome = super().step(now)
        for request, position in outcome.emitted:
            if position == 0:
                self._below.put_later(self._rank, request, now + outcome.duration)
        return outcome

    def _load(self, request: Request) -> int:
        """Waits for a load; where there is nothing further, 0, so that the prompt is computed in this step."""
        if request in self._fleet.fetching or self._below.begin(self._rank, request):
            return super()._load(request)
        return 0
