"""Has the hottest prefixes copied to a second segment of the shared store while the host that has them is busy.

Requests with a prefix whose holder is busy go to other workers, which load it from the store: from that very host's
memory and over its network. A second copy elsewhere spreads these loads, and outlives the host. Copies take memory from
other objects, so there are no more of them than the operator allows, and the store evicts them like any object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engines.store import Segment, Stored
from indexer.types import WorkerRank
from publishers.logs import log_event
from router.metrics.tallies import counter_family
from router.store.keeper import MOST
from router.store.master import Unanswered
from router.store.mooncake_client import ClientFailed, MooncakeClient
from router.store.shared_store import SharedStore
from router.workers.fleet import Fleet

logger = logging.getLogger(__name__)

INTERVAL: Final = 2.5
"""Seconds between two rounds, as between the keeper's."""


class Copy(NamedTuple):
    key: str
    segment: str
    """By its name."""


class StoreCopies(Collector):
    def __init__(
        self,
        store: SharedStore,
        fleet: Fleet,
        in_flight: Callable[[WorkerRank], int],
        client: MooncakeClient,
        budget: int,
    ) -> None:
        """`in_flight`: requests of a rank. `budget`: objects that may have a second copy at a time."""
        self._store = store
        self._fleet = fleet
        self._in_flight = in_flight
        self._client = client
        self._budget = budget
        self._copied = {"asked": 0, "failed": 0}
        self._failing = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.spread()
                self._failing = False
            except (Unanswered, ClientFailed) as error:
                self._fail(error)
            except Exception:  # else nothing would ever be copied again
                logger.exception("Hot prefixes could not be copied in the store")

    def _fail(self, error: Exception) -> None:
        self._copied["failed"] += 1
        level = logging.DEBUG if self._failing else logging.WARNING
        log_event(logger, level, "Hot prefixes could not be copied in the store", reason=error)
        self._failing = True

    async def spread(self) -> int:
        """One round, the hottest first; returns how many copies were asked for."""
        busy = busy_hosts(self._loads())
        if not busy:
            return 0
        copies = list(choose(await self._hottest(), await self._store.master.segments(), busy))
        for copy in copies:
            await self._client.copy(*copy)
            self._copied["asked"] += 1
        return len(copies)

    async def _hottest(self) -> dict[str, Stored]:
        """The objects of the hottest prefixes, as many as may have a copy; of a prefix all objects or none."""
        found: dict[str, Stored] = {}
        for _, lookup, prompt in self._store.hottest_prompts(MOST):
            keys = lookup.keys_of_prompt(prompt)
            await asyncio.sleep(0)  # names take time that others may need
            if keys and len(found.keys() | set(keys)) <= self._budget:
                objects = await self._store.master.stored(keys)
                found |= objects if len(objects) == len(keys) else {}
        return found

    def _loads(self) -> dict[str, float]:
        """Requests in flight for each rank, by host."""
        ranks: dict[str, list[WorkerRank]] = {}
        for worker in self._fleet.up:
            ranks.setdefault(worker.host, []).extend(worker.ranks)
        return {host: sum(map(self._in_flight, these)) / len(these) for host, these in ranks.items() if these}

    # -- prometheus_client's Collector

    def collect(self) -> Iterator[Metric]:
        counts = [((outcome,), count) for outcome, count in self._copied.items()]
        yield counter_family("router_store_copies", "Objects copied to a second segment.", ("outcome",), counts)

    async def close(self) -> None:
        await self._client.close()


def busy_hosts(loads: Mapping[str, float]) -> frozenset[str]:
    """The hosts with more load than the mean."""
    mean = sum(loads.values()) / max(1, len(loads))
    return frozenset(host for host, load in loads.items() if load > mean)


def choose(objects: Mapping[str, Stored], segments: Sequence[Segment], busy: frozenset[str]) -> Iterator[Copy]:
    """A copy for each object that lies on one host only, which is busy. It goes to the segment with most room on a host
    that is not busy, or that serves none of our requests."""
    room = {s.endpoint: s.size - s.used for s in segments if host_of(s.endpoint) not in busy}
    names = {segment.endpoint: segment.name for segment in segments}
    for key, stored in objects.items():
        if len(stored.owners) != 1 or host_of(stored.owners[0]) not in busy or not room:
            continue
        roomiest = max(room, key=lambda endpoint: room[endpoint])
        if room[roomiest] >= stored.size:
            room[roomiest] -= stored.size
            yield Copy(key, names[roomiest])


def host_of(endpoint: str) -> str:
    """The host in HOST:PORT, written as `Worker.host` is: without brackets."""
    return endpoint.rpartition(":")[0].strip("[]")
