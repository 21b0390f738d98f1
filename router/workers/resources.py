"""Creates and discards what belongs to each worker: its load books, its part of the index, its publisher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import aiohttp

from engines.problems import OLD_EVENTS
from indexer.kv_indexer import KVIndexer
from indexer.types import WorkerRank
from publishers.plane import EventPlane
from publishers.publisher import EnginePublisher
from router.metrics.registry import Metrics
from router.scheduling.scheduler import Scheduler
from router.settings import Settings
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

Learn = Callable[[Worker], Awaitable[object]]


class _Followed(NamedTuple):
    """A publisher, and what it was made for."""

    what: tuple[object, ...]
    publisher: EnginePublisher


def _what_is_followed(worker: Worker) -> tuple[object, ...]:
    """All of `worker` that its publisher depends on. The publisher is replaced only where some of this has changed:
    each new one loses what the engine cannot replay, and an adapter or a role makes no difference to it."""
    found, stated = worker.description, (worker.spec.events, worker.spec.replay, worker.spec.block_size)
    if found is None:
        return stated
    of_events = (found.kind, found.event_sources, found.block_size, OLD_EVENTS in found.problems)
    of_load = (found.total_blocks, found.max_running, found.max_loras)
    return *stated, *of_events, found.dp_size, found.first_rank, *of_load


class WorkerResources:
    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        indexer: KVIndexer,
        metrics: Metrics,
        plane: EventPlane,
        session: aiohttp.ClientSession,
        learners: Collection[Learn],
        forgetters: Collection[Callable[[str], None]] = (),
        *,
        reads_prompts: bool = True,
        follow_events: bool = True,
    ) -> None:
        """`learners` are called with each worker that has described itself, `forgetters` with the name of each that has
        left. `reads_prompts`: whether any are looked up in the index."""
        self._settings = settings
        self._scheduler = scheduler
        self._indexer = indexer
        self._metrics = metrics
        self._plane = plane
        self._session = session
        self._learners = learners
        self._forgetters = forgetters
        self._reads_prompts = reads_prompts
        self._follow_events = follow_events
        self._ranks: dict[str, set[WorkerRank]] = {}
        self._followed: dict[str, _Followed] = {}

    async def set_up(self, worker: Worker) -> None:
        """The worker came up, for the first time or again: keep its books, follow its events, call the learners."""
        local = self._settings.event_plane == "local"
        ranks = set(worker.ranks)
        self._forget(self._ranks.get(worker.id, set()) - ranks)
        self._ranks[worker.id] = ranks
        self._metrics.tallies.worker(worker.id)  # there before its first request: a rate is of what was there before
        for rank in worker.ranks:
            self._scheduler.watch(rank, worker.block_size)
            # Over a broker, events may come for a worker that cannot say itself that it has some.
            if self._follow_events and (worker.has_events or not local):
                self._indexer.watch(rank)
            elif self._indexer.watches(rank):  # it publishes no more: what it told is not true for long
                self._indexer.forget(rank)
            self._indexer.worker_restarted(rank)
            if self._reads_prompts:  # else its loops, which this needs, are not compiled
                self._indexer.resize(rank, worker.cache_blocks)
        if local:
            await self._publish_for(worker)
        for learn in self._learners:
            await learn(worker)

    async def _publish_for(self, worker: Worker) -> None:
        """Runs in this process the same publisher that else runs beside an engine; a new one if the engine has
        changed."""
        followed, what = self._followed.get(worker.id), _what_is_followed(worker)
        if followed and followed.what == what:
            followed.publisher.look_again()
            return
        if followed:
            await followed.publisher.close()
        publisher = EnginePublisher(
            worker_id=worker.id,
            url=worker.spec.url,
            plane=self._plane,
            namespace=self._settings.event_namespace,
            description=worker.description,
            events=worker.spec.events,
            replay=worker.spec.replay,
            block_size=worker.spec.block_size,
            follow_events=self._follow_events,
            session=self._session,
            load_interval=self._settings.load_interval,
            connect_patience=None,  # `MissingEvents` reports it
        )
        self._followed[worker.id] = _Followed(what, publisher)
        await publisher.start()

    async def discard(self, worker: Worker) -> None:
        """The worker has left: another that comes with the same name starts with nothing."""
        followed = self._followed.pop(worker.id, None)
        if followed:
            await _close(worker.id, followed.publisher)
        self._forget(self._ranks.pop(worker.id, set()))
        for forget in self._forgetters:
            forget(worker.id)

    def _forget(self, ranks: Collection[WorkerRank]) -> None:
        for rank in ranks:
            self._scheduler.forget(rank)
            self._indexer.forget(rank)

    def keep_tallies(self, workers: Collection[str]) -> None:
        """Drop the metrics of workers other than these, which have left."""
        self._metrics.keep(workers)

    async def close(self) -> None:
        await asyncio.gather(*(_close(name, followed.publisher) for name, followed in self._followed.items()))


async def _close(worker_id: str, publisher: EnginePublisher) -> None:
    try:
        await publisher.close()
    except Exception:  # whatever it is, what follows must happen
        logger.exception("A publisher could not be closed", extra={"fields": {"worker": worker_id}})
