"""Publishes one engine's events and load: finds out what it is, follows each of its ranks, and polls its load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import aiohttp
import msgspec

import engines.sglang.decode
import engines.vllm.decode
from engines.description import EngineDescription, EngineKind, EventSource
from engines.endpoints import confined, reachable
from engines.probe import probe
from engines.problems import BAD_ENDPOINT, FOREIGN_ENDPOINT, OLD_EVENTS, WANTS_KEY, other_block_size
from engines.rank_load import RankLoad
from indexer.types import WorkerRank
from publishers.credentials import make_session
from publishers.dialogue import converse
from publishers.ending import end_tasks
from publishers.load_poller import INTERVAL, LoadCounts, LoadPoller
from publishers.logs import log_event
from publishers.plane import EventPlane
from publishers.rank import Decode, EngineRank, Epochs
from publishers.zmq_source import CONNECT_PATIENCE, REPLAY_TIMEOUT, ZmqSource

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 5.0
PROBE_INTERVAL = 1.0
"""Seconds between attempts to find out about an engine that does not answer yet."""
RESTART_DELAY = 5.0
"""Seconds from an unexpected failure until the publisher starts again."""

FAILED = "A publisher has failed and begins anew"
UNTOLD_EVENTS = (
    "The engine does not say where it publishes KV events: start it with --kv-events-config, or state the endpoint "
    "(--events tcp://HOST:PORT)"
)
FOREIGN_EVENTS = (
    "The engine names an event endpoint on a host that is not its URL's, which is not followed: allow the host with "
    "--event-host HOST, or state the endpoint (--events tcp://HOST:PORT)"
)
BAD_EVENTS = (
    "The engine names an event endpoint that nobody can connect to: state a right one (--events tcp://HOST:PORT)"
)
_WHY_NONE = {WANTS_KEY: WANTS_KEY, OLD_EVENTS: OLD_EVENTS, FOREIGN_ENDPOINT: FOREIGN_EVENTS, BAD_ENDPOINT: BAD_EVENTS}
"""What is logged where no event endpoint was found, by what the engine's description has as the problem. That names
flags of the router's; these sentences name those of a publisher."""


class EnginePublisher:
    """Publishes the events and the load of the engine at `url` as worker `worker_id`.

    Without a `description` the engine is asked for it until it answers. `events` and `replay` are ZMQ endpoints that
    replace those that the engine names (given for rank 0; each further rank has the next port; a `*` in `replay` stands
    for the host of `url`), and `block_size` likewise replaces the engine's. Without `follow_events` only the load is
    published. `connect_patience` and `restart_delay` are those of `ZmqSource`, in seconds. `now_ns` is the wall clock.
    A `session` passed in is not closed here.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        url: str,
        plane: EventPlane,
        namespace: str = "default",
        description: EngineDescription | None = None,
        events: str | None = None,
        replay: str | None = None,
        block_size: int | None = None,
        follow_events: bool = True,
        session: aiohttp.ClientSession | None = None,
        load_interval: float = INTERVAL,
        replay_timeout: float = REPLAY_TIMEOUT,
        connect_patience: float | None = CONNECT_PATIENCE,
        event_hosts: Collection[str] = (),
        restart_delay: float = RESTART_DELAY,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.worker_id = worker_id
        self._url = url
        self._plane = plane
        self._namespace = namespace
        self._description = description
        # Engines are told where to listen, and operators repeat that here: `*` is the engine's own host.
        self._overrides = (events, reachable(replay, urlsplit(url).hostname or "") or replay, block_size)
        self._follow_events = follow_events
        self._session = session
        self._owns_session = session is None
        self._load_interval = load_interval
        self._replay_timeout = replay_timeout
        self._connect_patience = connect_patience
        self._event_hosts = event_hosts
        self._restart_delay = restart_delay
        self._epochs = Epochs(now_ns)
        self.ranks: dict[int, EngineRank] = {}
        """By number; none until the engine has described itself."""
        self.sources: dict[int, ZmqSource] = {}
        """Of the ranks whose event endpoint is known."""
        self.load = LoadCounts()
        self._poller: LoadPoller | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns at once: the engine need not be up yet."""
        if self._session is None:
            self._session = make_session(list)
        self._task = asyncio.create_task(self._run(self._session), name=f"publisher of {self.worker_id}")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])
            self._task = None
        await self._leave()
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    def look_again(self) -> None:
        """The engine is known to be there: it is polled soon, where it was not reached for a while."""
        if self._poller is not None:
            self._poller.look_again()

    async def _run(self, session: aiohttp.ClientSession) -> None:
        told = ""
        while True:
            try:
                await self._publish(session)
            except Exception as error:
                # Any exception: a publisher that ends here would stay silent about its engine.
                fields = {"worker": self.worker_id, "error": repr(error)}
                logger.exception(FAILED, exc_info=repr(error) != told, extra={"fields": fields})
                told = repr(error)
            await asyncio.sleep(self._restart_delay)

    async def _publish(self, session: aiohttp.ClientSession) -> None:
        try:
            found = self._description or await self._probe(session)
            while True:
                poller = await self._begin(found, session)
                found = await self._until_changed(poller, found, session)
                log_event(logger, logging.INFO, "The engine has changed", worker=self.worker_id, engine=self._url)
                await self._leave()
        except Exception:
            await self._leave()
            for rank in self.ranks.values():
                rank.disown()
            raise

    async def _begin(self, found: EngineDescription, session: aiohttp.ClientSession) -> LoadPoller:
        description = with_overrides(found, *self._overrides)
        if self._description is None:  # otherwise the problems were logged by whoever described it
            self._warn(found, description)
        await self._follow(description)
        self._poller = LoadPoller(self._url, description, session, self._report, self._load_interval, self.load)
        return self._poller

    async def _until_changed(
        self, poller: LoadPoller, found: EngineDescription, session: aiohttp.ClientSession
    ) -> EngineDescription:
        """Reports the engine's load until the engine publishes otherwise than `found`; returns its new description.
        Never returns where the description was passed in: whoever did so sees such changes, and replaces this one."""
        while True:
            await self._until_replaced(poller)
            self._doubt_unconnected()
            if self._description is None:
                now = await self._probe(session)
                if _publishes_otherwise(*(with_overrides(each, *self._overrides) for each in (found, now))):
                    return now
                if found.event_sources and not now.event_sources:
                    self._warn(now, with_overrides(now, *self._overrides))

    async def _until_replaced(self, poller: LoadPoller) -> None:
        before = self._reconnections
        await poller.until_back(lambda: self._description is None and self._reconnections > before)

    @property
    def _reconnections(self) -> int:
        """How often events came over another connection than before, perhaps from another process."""
        return sum(max(0, source.counts.connections - 1) for source in self.sources.values())

    def _doubt_unconnected(self) -> None:
        """After the engine was away and has come back: ranks whose events are not connected (and may never be) are no
        longer taken to hold what they held before."""
        for number, source in self.sources.items():
            if not source.connected:
                self.ranks[number].has_events = False

    async def _leave(self) -> None:
        for source in self.sources.values():
            await source.close()
        # All at once: each waits for the broker, which may hang.
        await asyncio.gather(*(rank.close() for rank in self.ranks.values()))

    async def _probe(self, session: aiohttp.ClientSession) -> EngineDescription:
        host, said = urlsplit(self._url).hostname or "", ""
        while True:
            description, trouble = await converse(probe(host), session, self._url, PROBE_TIMEOUT)
            # An engine that is still starting may answer some of the requests and not others.
            if not trouble or description.event_sources:
                return confined(description, host, self._event_hosts, stated=self._overrides[0] is not None)
            if trouble != said:
                said, message = trouble, "The engine does not answer yet"
                who = {"worker": self.worker_id, "engine": self._url}
                log_event(logger, logging.WARNING, message, **who, trouble=trouble)
            await asyncio.sleep(PROBE_INTERVAL)

    def _warn(self, found: EngineDescription, description: EngineDescription) -> None:
        untold = next((why for problem, why in _WHY_NONE.items() if problem in found.problems), UNTOLD_EVENTS)
        lacking = () if description.event_sources else (untold,)
        for problem in (*lacking, *other_block_size(description.block_size, found.block_size)):
            log_event(logger, logging.WARNING, problem, worker=self.worker_id, engine=self._url)

    async def _follow(self, description: EngineDescription) -> None:
        self.ranks, self.sources = {}, {}
        sources = {source.dp_rank: source for source in description.event_sources}
        for number in sources or range(description.dp_size):
            rank = WorkerRank(self.worker_id, number)
            decoder, size, blocks = DECODERS[description.kind], description.block_size, description.total_blocks
            publisher = EngineRank(rank, self._plane, self._namespace, self._epochs, decoder, size, blocks)
            await publisher.start(self._follow_events)
            self.ranks[number] = publisher
            self._listen(number, sources.get(number) if self._follow_events else None)
        log_event(
            logger, logging.INFO, "Publishing", worker=self.worker_id, engine=description.kind, ranks=len(self.ranks)
        )

    def _listen(self, number: int, source: EventSource | None) -> None:
        # Until the engine is connected nobody knows what it holds.
        self.ranks[number].has_events = self.ranks[number].caught_up = False
        if source is None:
            return
        listener = ZmqSource(
            source,
            self.ranks[number],
            replay_timeout=self._replay_timeout,
            connect_patience=self._connect_patience,
            restart_delay=self._restart_delay,
        )
        try:
            listener.start()
        except ValueError as error:
            rank = self.ranks[number].relay.rank
            log_event(logger, logging.ERROR, "Its events cannot be followed", worker=rank, error=error)
            return
        self.sources[number] = listener

    def _report(self, loads: dict[int, RankLoad]) -> None:
        for number, rank in self.ranks.items():
            rank.report(loads.get(number, RankLoad()))


DECODERS: dict[EngineKind, Callable[[], Decode]] = {
    "vllm": engines.vllm.decode.Decoder,
    "sglang": lambda: engines.sglang.decode.decode,
    # An unknown engine that uses this protocol has most likely copied vLLM's.
    "unknown": engines.vllm.decode.Decoder,
}
"""Makes a new decoder, by kind of engine."""


def _publishes_otherwise(before: EngineDescription, now: EngineDescription) -> bool:
    """Whether the ranks or their event sources have changed, so that the new ones must be followed. An engine that has
    no source any more, or of which nothing is known, may still be starting: it is no change, and there would be nothing
    to follow. Nor is it one that the block size is not told any more, as where a request was not answered in time."""
    if now.kind == "unknown" or (before.event_sources and not now.event_sources):
        return False
    told = [(each.kind, each.event_sources or each.dp_size) for each in (before, now)]
    return told[0] != told[1] or now.block_size not in (None, before.block_size)


def with_overrides(
    description: EngineDescription, events: str | None, replay: str | None, block_size: int | None
) -> EngineDescription:
    """The description, with the operator's settings in place of what the engine says."""
    found = description.event_sources
    if events is not None and not found and OLD_EVENTS not in description.problems:
        found = tuple(EventSource(rank, "") for rank in range(description.dp_size))
    sources = tuple(
        EventSource(
            source.dp_rank,
            _port_after(events, n) or source.endpoint,
            _port_after(replay, n) or source.replay,
            source.topic,
        )
        for n, source in enumerate(found)
    )
    return msgspec.structs.replace(description, event_sources=sources, block_size=block_size or description.block_size)


def _port_after(endpoint: str | None, offset: int) -> str | None:
    """The endpoint with its port raised by `offset`, as engines do for each rank; one without a port is unchanged."""
    if endpoint is None or not offset:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + offset}" if port.isascii() and port.isdigit() else endpoint
