"""A publisher inside the engine's own process: a daemon thread with an event loop of its own.

The engine's step loop only ever appends to a queue; encoding, hashing and the network happen in the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from engines.rank_load import RankLoad
from indexer.types import WorkerRank
from publishers.connect import make_plane
from publishers.logs import log_event
from publishers.plane import EventPlane, figures_subject
from publishers.plugin_settings import Settings
from publishers.rank import Decode, EngineRank, Epochs

logger = logging.getLogger(__name__)

FAILED = "Publishing from inside the engine has failed and begins anew"

QUEUE_LIMIT = 10_000
"""Batches that may wait for the thread, as many as vLLM keeps for replay; more are dropped."""

REPORT_INTERVAL = 1.0
RESTART_DELAY = 5.0
"""Seconds from an unexpected failure until everything starts again."""
FIGURES_PATIENCE = 3.0
"""Seconds without a word of a front end, which repeats its figures every second, until those of others count again."""
STOP_TIMEOUT = 3.0
TURN = 64
"""Batches handled before the rest of the thread's loop gets its turn."""


class _Figures(msgspec.Struct, frozen=True):
    """An engine may have several front ends, all on one machine, each of which gets some of the figures: the latest
    ones of any of them count, as long as they are repeated."""

    at: int
    """Nanoseconds of the machine's steady clock."""
    load: RankLoad


class PlaneThread:
    """Runs `main(plane, stop)` in a daemon thread. It should return soon after `stop` is set, and is run again if it
    fails."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        main: Callable[[EventPlane, asyncio.Event], Awaitable[None]],
        restart_delay: float,
    ) -> None:
        self._main = main
        self._settings = settings
        self._restart_delay = restart_delay
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """From any thread; does nothing once the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Waits for the thread to end, for `STOP_TIMEOUT` at most."""
        self.call_soon(self._stop.set)
        self._thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_stopped())

    async def _until_stopped(self) -> None:
        told = ""
        while not self._stop.is_set():
            try:
                await self._with_plane()
            except Exception as error:
                # Of any kind: else the engine would publish nothing more until it is restarted.
                logger.exception(FAILED, exc_info=repr(error) != told, extra={"fields": {"error": repr(error)}})
                told = repr(error)
                await _wait(self._stop, self._restart_delay)

    async def _with_plane(self) -> None:
        plane = make_plane(self._settings.nats, self._settings.files)
        try:
            await plane.start()
            await self._main(plane, self._stop)
        finally:
            await plane.close()


class EventThread:
    """Publishes batches of engine events, which may be any objects that msgspec encodes to what `make_decode` reads."""

    def __init__(
        self,
        settings: Settings,
        dp_rank: int,
        make_decode: Callable[[], Decode],
        restart_delay: float = RESTART_DELAY,
    ) -> None:
        self.dropped = 0
        """Batches for which there was no room."""
        self._rank = WorkerRank(settings.worker_id, dp_rank)
        self._namespace = settings.namespace
        self._epochs = Epochs(time.time_ns)
        self._make_decode = make_decode
        self._queue: deque[object] = deque()
        self._told_of_drops = 0
        self._wake = asyncio.Event()
        self._woken = False
        """Whether `_wake` was set for what is in the queue: once is enough, however many batches come."""
        self._heard = False
        """Whether any batch of the engine was taken from the queue."""
        self._figures = _Figures(0, RankLoad())
        self._figures_until = 0.0
        """When whoever sent these figures is taken to have ended, if they are not repeated. What has the same worker id
        by mistake, on a machine that has run for longer, would else be believed for ever."""
        self._thread = PlaneThread(f"kv-router events {self._rank}", settings, self._main, restart_delay)

    def publish(self, batch: object) -> None:
        """From the engine's thread; never blocks. The batch must not change any more."""
        if len(self._queue) >= QUEUE_LIMIT:
            self.dropped += 1
            return
        self._queue.append(batch)
        if not self._woken:
            self._woken = True
            self._thread.call_soon(self._wake.set)

    def stop(self) -> None:
        """Publishes what is waiting, if that is quickly done, and ends the thread."""
        self._thread.stop()

    async def _main(self, plane: EventPlane, stop: asyncio.Event) -> None:
        rank = EngineRank(self._rank, plane, self._namespace, self._epochs, self._make_decode)
        if self._heard:  # before a failure: the engine does not repeat what it has said
            rank.lose_track()
        await rank.start()
        await plane.subscribe(figures_subject(self._namespace, self._rank), self._on_figures)
        try:
            await _until(stop, self._forward(rank), self._report(rank))
            await self._drain(rank)
        except Exception:
            rank.disown()
            raise
        finally:
            await rank.close()

    def _on_figures(self, payload: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            figures, now = msgspec.msgpack.decode(payload, type=_Figures), time.monotonic()
            if figures.at >= self._figures.at or now > self._figures_until:
                self._figures, self._figures_until = figures, now + FIGURES_PATIENCE

    async def _forward(self, rank: EngineRank) -> None:
        self._wake.set()  # for what has come before
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Before the queue is emptied: what is appended from now on wakes again.
            self._woken = False
            await self._drain(rank)

    async def _drain(self, rank: EngineRank) -> None:
        for count in range(len(self._queue)):
            self._apply(rank, self._queue.popleft())
            if count % TURN == TURN - 1:
                await asyncio.sleep(0)
        if self.dropped > self._told_of_drops:
            self._told_of_drops = self.dropped
            log_event(
                logger, logging.WARNING, "Events came too fast and are lost", worker=self._rank, batches=self.dropped
            )
            rank.lose_track()

    def _apply(self, rank: EngineRank, batch: object) -> None:
        self._heard = True
        try:
            rank.apply(msgspec.msgpack.encode(batch))
        except Exception:
            # Of objects that another project may change at any time; the next batch may be well.
            if not rank.relay.counts.malformed:
                logger.exception("A batch of the engine cannot be published; further ones are only counted")
            rank.relay.malformed()

    async def _report(self, rank: EngineRank) -> None:
        while True:
            rank.report(self._figures.load)
            await asyncio.sleep(REPORT_INTERVAL)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """For so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


async def _until(stop: asyncio.Event, *work: Coroutine[Any, Any, object]) -> None:
    """Runs coroutines that have no end until `stop` is set. Raises what one of them raises."""
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(one) for one in (*work, stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


class FiguresThread:
    """Sends the latest figures of one rank to where its events are published: when they have changed, and again every
    second, since an engine that is idle makes no others and one message may be lost."""

    def __init__(self, settings: Settings, dp_rank: int, interval: float = 0.25) -> None:
        self._subject = figures_subject(settings.namespace, WorkerRank(settings.worker_id, dp_rank))
        self._interval = interval
        self._latest: _Figures | None = None
        self._thread = PlaneThread(f"kv-router figures {dp_rank}", settings, self._main, RESTART_DELAY)

    def update(self, load: RankLoad) -> None:
        """From any thread; never blocks."""
        self._latest = _Figures(time.monotonic_ns(), load)

    def stop(self) -> None:
        self._thread.stop()

    async def _main(self, plane: EventPlane, stop: asyncio.Event) -> None:
        sent: RankLoad | None = None
        due = 0.0
        while not stop.is_set():
            latest, now = self._latest, time.monotonic()
            if latest and (latest.load != sent or now >= due):
                sent, due = latest.load, now + REPORT_INTERVAL
                plane.publish(self._subject, msgspec.msgpack.encode(latest))
            await _wait(stop, self._interval)
