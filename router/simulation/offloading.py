"""Simulated workers with tiers below the GPU: host memory, as vLLM's with `--kv-offloading-size`, and a disk below it.

When a request has its first token, the full blocks of its prompt are copied to host memory; what is least recently used
there goes to the disk, if there is one. An admitted request uses the leading blocks of its worker's cache, and loads
the further ones from the tiers, one request at a time. Other requests are computed meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from engines.sim.request import Request
from indexer.types import SequenceHash, Tier, WorkerRank
from router.simulation.load_lines import LoadLines

if TYPE_CHECKING:
    from router.simulation.fleet import FleetSettings, VirtualFleet

COPY_DELAY: Final = 0.01
"""Seconds from the first token until the prompt's blocks are copied, and their events on the way: about a step."""


class _Level(NamedTuple):
    tier: Tier
    capacity: int
    """Blocks."""
    base: float
    """Seconds of each load."""
    per_block: float
    """Seconds."""


_Held: TypeAlias = OrderedDict[SequenceHash, None]
"""What one worker holds on one level, the least recently used first."""


class LowerTiers:
    """Those of all workers of a simulated fleet."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self._fleet = fleet
        self._size = fleet.settings.block_size
        self._levels = _levels(fleet.settings)
        self._held: dict[WorkerRank, list[_Held]] = {}
        """By worker, then by level."""
        self._lines = LoadLines()

    def lose(self, rank: WorkerRank) -> None:
        self._held.pop(rank, None)
        self._lines.lose(rank)

    def begin(self, rank: WorkerRank, request: Request) -> bool:
        """Starts to load the blocks that the worker's cache lacks; returns whether there are any. The last token of the
        prompt is always computed."""
        own = request.computed // self._size
        wanted = request.hashes[: (request.prompt_length - 1) // self._size]
        counts = self._leading(rank, wanted[own:])
        there = own + sum(counts)
        self._use(rank, wanted[:there])
        if there == own:
            return False
        parts = zip(self._levels, counts, strict=True)
        seconds = sum(level.base + count * level.per_block for level, count in parts if count)
        done = self._lines.add(rank, self._fleet.timeline.now(), seconds)
        self._fleet.timeline.call_at(done, self._loaded, rank, request, there * self._size)
        return True

    def _leading(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> list[int]:
        """How many of the leading blocks come from each level, until one is on none."""
        held, counts = self._held.get(rank, []), [0] * len(self._levels)
        for one in hashes:
            level = next((level for level, there in enumerate(held) if one in there), None)
            if level is None:
                break
            counts[level] += 1
        return counts

    def _use(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> None:
        for there in self._held.get(rank, []):
            for one in reversed(hashes):  # so that of one prefix the tail is lost before the head
                if one in there:
                    there.move_to_end(one)

    def _loaded(self, rank: WorkerRank, request: Request, there: int) -> None:
        worker = self._fleet.workers.get(rank)
        if worker and worker.scheduler.loading.get(request.request_id) is request:
            request.cached_tokens += there - request.computed
            worker.loaded(request.request_id, there)

    def put_later(self, rank: WorkerRank, request: Request, at: float) -> None:
        hashes = request.hashes[: request.prompt_length // self._size]
        self._fleet.timeline.call_at(at + COPY_DELAY, self._put, rank, hashes[::-1])

    def _put(self, rank: WorkerRank, hashes: Sequence[SequenceHash]) -> None:
        """The tail of a prompt first, which is to be lost first."""
        if rank not in self._fleet.workers:
            return
        held = self._held.setdefault(rank, [OrderedDict() for _ in self._levels])
        for level, there in zip(self._levels, held, strict=True):
            if not hashes:
                break
            new = [one for one in hashes if one not in there]
            for one in hashes:
                there[one] = None
                there.move_to_end(one)
            hashes = [there.popitem(last=False)[0] for _ in range(len(there) - level.capacity)]
            self._fleet.tell_of_tier(rank, level.tier, new, hashes)


def _levels(settings: FleetSettings) -> list[_Level]:
    gigabytes = settings.block_size * settings.kv_bytes_per_token / 1e9
    host = _Level(
        Tier.CPU, settings.host_tokens // settings.block_size, settings.host_base_s, gigabytes / settings.host_gb_s
    )
    disk = _Level(
        Tier.DISK, settings.disk_tokens // settings.block_size, settings.disk_base_s, gigabytes / settings.disk_gb_s
    )
    return [host, disk] if settings.disk_tokens else [host]
