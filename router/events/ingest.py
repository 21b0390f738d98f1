"""Takes batches and reports from the event plane into the index and the load book, and asks for replays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from engines.answers import UNDECODABLE
from indexer.events import ReplayRequest, decode_batch, decode_load, encode
from indexer.kv_indexer import KVIndexer
from indexer.types import WorkerRank
from publishers.ending import end_tasks
from publishers.logs import log_event
from publishers.plane import EventPlane, PlaneUnavailable, all_events, all_loads, replay_subject
from router.metrics.registry import Metrics
from router.scheduling.load import LoadBook

logger = logging.getLogger(__name__)

MOST_REPLAYS = 8
"""Replays under way at once; further ones wait for their turn. Their answers gather at the broker, up to 8 MB each, and
it disconnects a receiver for which 64 MB wait: then all is lost, and asked for again, when a large fleet's router
starts or reconnects."""
TICK = 1.0
"""Seconds between two ticks, which `indexer.cursor.SILENCE` counts."""

RIVALS = "Two publishers speak for one rank, of which one counts at a time; each engine needs one, with its --worker-id"
UNREADABLE = (
    "A message on the event plane cannot be read, and further ones are only counted: something else publishes on its "
    "subjects, or a publisher of another version than this router"
)
STRANGER_PATIENCE = 10
"""Ticks for which somebody must speak of a worker that is none of ours before that is logged: publishers may start
before their workers join, and end after these have left."""
_STRANGER_RESTS, _STRANGER_LEAVES = 180, 3600
"""Ticks of silence after which one of whom nothing was logged, or something, is forgotten."""
_MOST_STRANGERS = 100
"""Unknown workers that are remembered at most, and so logged in an hour; their names come from the network."""
_LONGEST_NAME = 128


class _Stranger:
    """Somebody who speaks of a worker that is none of ours."""

    def __init__(self, tick: int) -> None:
        self.since = self.heard = tick
        """The ticks at which it was heard first and last."""
        self.told = False


class Ingest:
    def __init__(
        self,
        plane: EventPlane,
        namespace: str,
        indexer: KVIndexer,
        book: LoadBook,
        metrics: Metrics,
        clock: Callable[[], float],
        knows: Callable[[str], bool] = lambda _: True,
        events: bool = True,
    ) -> None:
        """`knows`: whether a worker is one of this router's. `events`: False for load reports alone."""
        self._plane = plane
        self._namespace = namespace
        self._indexer = indexer
        self._book = book
        self._metrics = metrics
        self._clock = clock
        self._replays: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(MOST_REPLAYS)
        self._knows = knows
        self._events = events
        self._told: set[str] = set()
        self._strangers: dict[str, _Stranger] = {}
        self._ticks = 0
        self._rivalled: set[WorkerRank] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        if self._events:
            await self._plane.subscribe(all_events(self._namespace), self._on_batch)
        await self._plane.subscribe(all_loads(self._namespace), self._on_report)
        self._plane.on_reconnect(lambda: self._ask_all(self._indexer.on_reconnect()))
        self._tick_later()

    async def close(self) -> None:
        """Messages that still come are applied, but nothing is asked for any more."""
        self._closed = True
        if self._timer:
            self._timer.cancel()
        await end_tasks(self._replays)

    def tick(self) -> None:
        """Notice ranks that have fallen silent, and ranks for which two publishers speak."""
        self._ticks += 1
        self._forget_strangers()
        self._indexer.on_tick(self._plane.connected)
        rivalled = self._indexer.rivalled()
        for rank in rivalled:
            if rank not in self._rivalled:
                log_event(logger, logging.WARNING, RIVALS, worker=rank.worker_id, dp_rank=rank.dp_rank)
        self._rivalled = set(rivalled)

    def ask_anew(self, rank: WorkerRank) -> None:
        """What is indexed of `rank` turned out to be wrong: its publisher is asked for all of it."""
        self._ask_all(self._indexer.ask_anew(rank))

    def _tick_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._tick_later()  # first: whatever goes wrong in one tick, the next one comes
        self.tick()

    def _on_batch(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except UNDECODABLE:
            self._undecodable("events")
            return
        if not self._indexer.watches(batch.rank):
            self._tell_of_stranger(batch.worker_id)
        self._ask_all(self._indexer.on_batch(batch))

    def _on_report(self, payload: bytes) -> None:
        try:
            report = decode_load(payload)
        except UNDECODABLE:
            self._undecodable("load")
            return
        if not self._indexer.watches(report.rank):
            self._tell_of_stranger(report.worker_id)
        self._book.on_report(report, self._clock())
        self._ask_all(self._indexer.on_report(report))

    def _tell_of_stranger(self, worker_id: str) -> None:
        if self._knows(worker_id):
            return
        name = worker_id[:_LONGEST_NAME]
        stranger = self._strangers.get(name)
        if stranger is None:
            if len(self._strangers) >= _MOST_STRANGERS:
                return
            stranger = self._strangers[name] = _Stranger(self._ticks)
        stranger.heard = self._ticks
        if not stranger.told and self._ticks - stranger.since >= STRANGER_PATIENCE:
            stranger.told = True
            text = "A publisher speaks of a worker that is none of ours; its --worker-id must be the worker's name here"
            log_event(logger, logging.WARNING, text, worker=name)

    def _forget_strangers(self) -> None:
        """Those that are ours by now, or have been silent for long: others must have their turn."""
        for name, stranger in list(self._strangers.items()):
            longest = _STRANGER_LEAVES if stranger.told else _STRANGER_RESTS
            if self._knows(name) or self._ticks - stranger.heard > longest:
                del self._strangers[name]

    def _undecodable(self, kind: str) -> None:
        self._metrics.undecodable.labels(kind).inc()
        if kind not in self._told:  # once: a sender that is wrong is wrong all the time
            self._told.add(kind)
            log_event(logger, logging.WARNING, UNREADABLE, kind=kind)

    def _ask_all(self, requests: Iterable[ReplayRequest]) -> None:
        for request in () if self._closed else requests:
            task = asyncio.ensure_future(self._replay(request))
            self._replays.add(task)
            task.add_done_callback(self._replays.discard)

    async def _replay(self, request: ReplayRequest) -> None:
        rank = WorkerRank(request.worker_id, request.dp_rank)
        outcome = "answered"
        try:
            async with self._turns:
                async for reply in self._plane.request(replay_subject(self._namespace, rank), encode(request)):
                    self._on_batch(reply)
        except PlaneUnavailable:
            outcome = "unanswered"
        except Exception:  # whatever it is, it is over: else the rank would never be asked for again
            outcome = "unanswered"
            logger.exception("A replay failed")
        self._metrics.replays.labels(outcome).inc()
        log_event(logger, logging.DEBUG, "Replay", worker=rank.worker_id, dp_rank=rank.dp_rank, outcome=outcome)
        self._ask_all(self._indexer.on_replay_end(rank))
