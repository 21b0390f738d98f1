"""Simulated workers with a second tier in their host's memory, as vLLM's with `--kv-offloading-size`.

When a request has its first token, the full blocks of its prompt are copied there; the least recently used go. An
admitted request uses the leading blocks of its worker's cache, and loads the further ones from the host's memory, one
request at a time. Other requests are computed meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from engines.sim.request import Request
from indexer.types import SequenceHash, WorkerRank

if TYPE_CHECKING:
    from router.simulation.fleet import VirtualFleet

COPY_DELAY: Final = 0.01
"""Seconds from the first token until the prompt's blocks are copied, and their events on the way: about a step."""


class HostMemory:
    """That of all workers of a simulated fleet."""

    def __init__(self, fleet: VirtualFleet) -> None:
        settings = fleet.settings
        self._fleet = fleet
        self._size = settings.block_size
        self._capacity = settings.host_tokens // self._size
        self._held: dict[WorkerRank, OrderedDict[SequenceHash, None]] = {}
        """By worker: the least recently used first."""
        self._free_at: dict[WorkerRank, float] = {}
        """When each worker will have finished its loads."""

    def lose(self, rank: WorkerRank) -> None:
        self._held.pop(rank, None)
        self._free_at.pop(rank, None)

    def begin(self, rank: WorkerRank, request: Request) -> bool:
        """Starts to load the blocks that the worker's cache lacks; returns whether there are any. The last token of the
        prompt is always computed."""
        own = request.computed // self._size
        wanted = request.hashes[: (request.prompt_length - 1) // self._size]
        count = self._leading(rank, wanted[own:])
        self._use(rank, wanted[: own + count])
        if not count:
            return False
        now, settings = self._fleet.timeline.now(), self._fleet.settings
        seconds = settings.host_base_s + count * self._size * settings.kv_bytes_per_token / (settings.host_gb_s * 1e9)
        done = self._free_at[rank] = max(now, self._free_at.get(rank, 0.0)) + seconds
        self._fleet.timeline.call_at(done, self._loaded, rank, request, (own + count) * self._size)
        return True

    def _leading(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> int:
        held: Collection[SequenceHash] = self._held.get(rank, ())
        return next((count for count, one in enumerate(hashes) if one not in held), len(hashes))

    def _use(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> None:
        held = self._held.get(rank)
        for one in reversed(hashes):  # so that of one prefix the tail is lost before the head
            if held and one in held:
                held.move_to_end(one)

    def _loaded(self, rank: WorkerRank, request: Request, there: int) -> None:
        worker = self._fleet.workers.get(rank)
        if worker and worker.scheduler.loading.get(request.request_id) is request:
            request.cached_tokens += there - request.computed
            worker.loaded(request.request_id, there)

    def put_later(self, rank: WorkerRank, request: Request, at: float) -> None:
        hashes = request.hashes[: request.prompt_length // self._size]
        self._fleet.timeline.call_at(at + COPY_DELAY, self._put, rank, hashes)

    def _put(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> None:
        if rank not in self._fleet.workers:
            return
        held = self._held.setdefault(rank, OrderedDict())
        new = [one for one in hashes if one not in held]
        held.update(dict.fromkeys(new))
        self._use(rank, hashes)
        gone = [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity)]
        self._fleet.tell_of_host(rank, new, gone)
