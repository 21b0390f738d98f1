"""Composition: every part is made and wired here, and nowhere else; then serve, drain, stop, in that order."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import aiohttp
import uvloop

import router.scheduling.limits
from engines.endpoints import url_host
from indexer.kv_indexer import KVIndexer
from publishers.embedded_nats import NatsServerError
from publishers.logs import configure_logging, log_event
from publishers.plane import EventPlane
from publishers.streams import say
from router.admin.access import by_keys
from router.admin.surface import AdminSurface, CannotAdminister
from router.arms import check_mode, make_arms, reads_prompts
from router.breaker import Breaker
from router.cli import Source
from router.core import Core
from router.exchange import Exchange
from router.fleet import Fleet, Worker
from router.hangups import take_hangups
from router.http.clients import Clients, Limits
from router.http.front import Connection
from router.http.pool import Pool
from router.http.protocol import for_loop
from router.index_audit import IndexAudit
from router.ingest import Ingest
from router.kept_responses import KeptResponses
from router.metrics import Metrics
from router.migrating import Migrations
from router.missing_events import MissingEvents
from router.openai_errors import error_response
from router.policies import make_policy
from router.port import check_free
from router.processes.member import Member, Sockets, parent_ended, share
from router.prompts import Prompts
from router.readings import Readings
from router.reloading import Reloading
from router.retry_budget import RetryBudget
from router.roster import Roster
from router.scheduling.admission import Admission, Objectives
from router.scheduling.backlog import Backlog
from router.scheduling.load import LoadBook
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.security.security import Security, check_security
from router.security.tls import HANDSHAKE_TIMEOUT
from router.server import Server
from router.settings import Settings, SettingsError
from router.split.pairing import loneliness
from router.store.copies import StoreCopies
from router.store.keeper import StoreKeeper, handed_over, warm
from router.store.mooncake_client import MooncakeClient, is_installed
from router.store.shared_store import SharedStore
from router.store.spec import StoreSpec
from router.tokens import find_tokenizer
from router.upkeep import Learn, Upkeep
from router.warm_up import warm_up
from router.watch import WorkerWatch
from router.watchdog import INTERVAL, LATE, Timeouts, Watchdog
from router.worker_spec import WorkerSpec

logger = logging.getLogger("router")

FIRST_LOOK = 5.0
"""Seconds that the router waits, before it listens, for workers to be looked at once; it serves without them after."""

_NOT_READ = "With a broker, events= and replay= of a worker are not read: its publisher takes --events and --replay"

_LAST_WORDS = 1.0
"""Seconds that clients have to take the end of an answer that was cut off; most have it at once."""


def run(settings: Settings, source: Source | None = None, member: Member | None = None) -> int:
    """Serve until a signal; returns the process's exit status. `source`: where the settings came from, to be read anew.
    `member`: as one of several processes."""
    try:
        check_tokenizer(settings)
        check_store(settings)
        make_policy(settings)
        make_arms(settings)
        check_mode(settings)
        check_security(settings)
    except SettingsError as error:
        sys.stderr.write(f"kv-router: {error}\n")
        return 2
    every = {"process": member.number} if member else None
    configure_logging(settings.log_level, settings.log_format, every=every)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, source, member))


def check_tokenizer(settings: Settings) -> None:
    """A stated tokenizer must be there; SettingsError says what is wrong. (Found ones are looked for later.)"""
    if reads_prompts(settings) and settings.tokenizer not in {"auto", "engine"}:
        find_tokenizer(settings.tokenizer, (), None)


def check_store(settings: Settings) -> None:
    """SettingsError when copies are wanted that cannot be asked for."""
    if settings.store and settings.store.copy and not is_installed():
        raise SettingsError(
            "the store's copy= needs Mooncake's client here: pip install mooncake-transfer-engine "
            "(without CUDA: mooncake-transfer-engine-non-cuda)"
        )


async def _serve(settings: Settings, source: Source | None, member: Member | None) -> int:
    app = App(settings, member, source)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app.on_signal, stop)
    await asyncio.sleep(0)  # where a Ctrl-C from before the handlers ends it: nothing is open yet
    try:
        if member is None:  # of several, the first has looked
            check_free(settings.host, settings.port)
        await app.start()
    except (NatsServerError, CannotAdminister) as error:
        log_event(logger, logging.ERROR, f"Cannot start: {error}")
        await app.close()
        return 1
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that none can be
        reason = getattr(error, "strerror", None) or error
        log_event(logger, logging.ERROR, f"Cannot listen: {reason}", host=settings.host, port=settings.port)
        await app.close()
        return 1
    if source:
        take_hangups(app.on_hangup)
    _leave_to_itself()
    orphaned = asyncio.create_task(_stop_with_parent(stop)) if member else None
    await stop.wait()
    if orphaned:
        orphaned.cancel()
    await app.drain(settings.drain_timeout)
    await app.close()
    return 0


def _leave_to_itself() -> None:
    """What is there by now stays: looking through all of it for garbage, again and again, takes 75 ms each time."""
    gc.collect()
    gc.freeze()


async def _stop_with_parent(stop: asyncio.Event) -> None:
    await parent_ended()
    stop.set()


class App:
    """The whole router in one object. `start`, then `drain` and `close`."""

    def __init__(self, settings: Settings, member: Member | None = None, source: Source | None = None) -> None:
        self._settings = settings
        self._source = source
        self._metrics = Metrics()
        self._draw = random.Random(settings.seed)  # noqa: S311 -- not for secrets
        self._security = Security(settings, time.monotonic, self._metrics.deny)
        self._fleet = Fleet([])
        shared = share(member) if member else None
        self._book = LoadBook(shared.load if shared else None)
        lifecycle = self._metrics.lifecycle
        self._indexer = KVIndexer(settings.approx_ttl, settings.index_max_memory, observer=lifecycle)
        self._plane: EventPlane = self._security.make_plane()
        self._ingest = Ingest(
            self._plane,
            settings.event_namespace,
            self._indexer,
            self._book,
            self._metrics,
            time.monotonic,
            self._fleet.workers.__contains__,
        )
        namespace = None if settings.event_plane == "local" else settings.event_namespace
        self._missing_events = MissingEvents(self._fleet, self._indexer, self._book, self._plane, namespace)
        self._audit = IndexAudit(self._indexer, self._ingest.ask_anew, settings.store is not None)
        self._audit.register(self._metrics)
        backlog = Backlog(shared.backlog if shared else None)
        self._scheduler = Scheduler(make_policy(settings), self._book, self._draw, backlog)
        lifecycle.loading = self._scheduler.loads.tokens
        objectives = Objectives(settings.ttft_slo, settings.tbt_slo)
        admission = Admission(objectives, settings.slo_action, settings.slo_patience)
        self._queue = Queue(self._scheduler, admission, time.monotonic, _call_later, _limits(settings))
        self._metrics.tallies.queue.length = self._queue.__len__
        self._core = Core(
            self._fleet,
            self._book,
            self._scheduler,
            self._queue,
            self._indexer,
            self._metrics,
            time.monotonic,
            RetryBudget(settings.retry_budget, time.monotonic()),
            settings.pd_timeout,
            settings.store is not None,
            self._audit,
            self._missing_events,
            shared.sent if shared else None,
        )
        self._migrations = self._make_migrations(settings.migration_limit)
        Readings(self._fleet, self._book, self._indexer, self._plane, time.monotonic).register(self._metrics)
        self._arms = make_arms(settings)
        if self._arms:
            self._metrics.registry.register(self._arms)
        self._sockets = Sockets(member, self._metrics.page) if member else None
        tally = self._metrics.tallies.clients
        self._clients: Clients[Connection] = Clients(_client_limits(settings), tally.refused)
        self._connections = self._clients.open
        tally.connections, tally.buffered = self._connections.__len__, lambda: self._clients.buffered
        self._roster: Roster | None = None
        self._reloading: Reloading | None = None
        self._admin: AdminSurface | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._under_way: set[Exchange] = set()
        self._session: aiohttp.ClientSession | None = None
        self._prompts: Prompts | None = None
        self._responses: KeptResponses | None = None
        self._store: SharedStore | None = None
        self._copies: StoreCopies | None = None
        self._is_first = member is None or member.number == 0
        self.port = settings.port

    def _make_migrations(self, limit: int) -> Migrations | None:
        if not limit:
            return None
        found = Migrations(limit, self._fleet, lambda model: self._prompts.ends(model) if self._prompts else None)
        self._metrics.registry.register(found)
        return found

    async def start(self) -> None:
        """Look at the workers, then listen. OSError when the address cannot be listened on."""
        settings = self._settings
        self._security.warn()
        warm_up(self._scheduler, settings.store is not None)
        self._scheduler.backlog.wanted = reads_prompts(settings)  # other modes do not ask
        self._session = self._security.make_session(self._fleet)
        self._responses = KeptResponses(self._fleet, self._session)
        await self._plane.start()
        await self._ingest.start()
        if reads_prompts(settings):
            self._prompts = Prompts(
                settings.tokenizer,
                self._core,
                self._session,
                settings.model_folder,
                send_ids=settings.send_token_ids,
            )
            if settings.store:
                self._store = SharedStore(
                    settings.store,
                    self._fleet,
                    self._session,
                    time.monotonic,
                    settings.model_folder,
                    self._security.workers.context,
                )
                self._metrics.registry.register(self._store)
        self._roster = roster = self._make_roster(self._session)
        roster.take(settings.workers, settings.drain_timeout)
        if self._source:
            self._reloading = Reloading(self._source, settings, roster, self._security.reload)
        await roster.first_looks(FIRST_LOOK)
        self._tell_of_the_lonely()
        await self._administer(roster)
        await self._listen()

    def _make_roster(self, session: aiohttp.ClientSession) -> Roster:
        settings = self._settings
        learners: list[Learn] = [part.learn for part in (self._prompts, self._store) if part]
        learners.append(partial(self._metrics.lifecycle.learn, folders=settings.model_folder))
        if self._store and settings.store and settings.store.warm:
            learners.append(partial(warm, session, store=self._store, number=settings.store.warm))
        upkeep = Upkeep(
            settings,
            self._scheduler,
            self._indexer,
            self._metrics,
            self._plane,
            session,
            learners,
            [self._prompts.forget] if self._prompts else [],
        )

        def watch(worker: Worker) -> WorkerWatch:
            return WorkerWatch(
                worker, self._fleet, session, settings.health_interval, upkeep.take_in, settings.event_host
            )

        over = partial(handed_over, store=self._store, indexer=self._indexer) if self._store else None
        return Roster(self._fleet, self._scheduler, upkeep, self._make_worker, watch, time.monotonic, over)

    def _make_worker(self, spec: WorkerSpec) -> Worker:
        settings, security = self._settings, self._security
        if settings.event_plane != "local" and (spec.events or spec.replay):
            log_event(logger, logging.WARNING, _NOT_READ, worker=spec.worker_id)
        pool = Pool(spec.url, settings.connect_timeout, security.workers.context, passing=security.answers_pass)
        return Worker(spec, pool, Breaker(settings.breaker_failures, self._draw.random))

    async def _administer(self, roster: Roster) -> None:
        """What may change while the router runs: by its settings' file, and by its admin surface."""
        settings, source = self._settings, self._source
        if self._reloading and settings.watch_config and source and source.file:
            self._tasks.append(asyncio.create_task(self._reloading.watch(source.file), name="config file"))
        if settings.admin_listen:
            guard = self._security.guard
            authorize = by_keys(guard) if guard else None
            self._admin = AdminSurface(roster, self._core, settings.drain_timeout, authorize)
            await self._admin.start(settings.admin_listen, self._security.front)

    def _tell_of_the_lonely(self) -> None:
        """Workers that are there for others which are not."""
        for worker in self._fleet.up:
            if why := loneliness(worker, self._fleet.up):
                log_event(logger, logging.WARNING, "A worker gets nothing to do", worker=worker.id, reason=why)

    async def _listen(self) -> None:
        settings = self._settings
        sockets = self._sockets
        if sockets:
            await sockets.start()
        everybodys = sockets.everybodys if sockets else None
        direct = settings.router_mode == "direct"
        security, guard = self._security, self._security.guard
        named = settings.tenant_header
        surface = Server(
            self._core,
            self._prompts,
            direct,
            int(time.time()),
            everybodys,
            self._arms,
            self._store,
            guard,
            named.lower().encode() if named else None,
            migrations=self._migrations,
            responses=self._responses,
        )
        admit = guard.refusal if guard else None
        self._under_way = surface.under_way
        self._tasks.append(asyncio.create_task(self._look_after(self._under_way), name="watchdog"))
        if self._store and settings.store:
            self._look_after_store(self._store, settings.store)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            for_loop(
                lambda: Connection(
                    surface.serve, error_response, self._clients, loop.call_later, security.passing, admit
                )
            ),
            settings.host,
            settings.port,
            backlog=1024,
            reuse_port=True if sockets else None,
            ssl=security.front,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT if security.front else None,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        host = url_host(settings.host)
        say(f"Listening on {'https' if security.front else 'http'}://{host}:{self.port}")

    def _look_after_store(self, store: SharedStore, spec: StoreSpec) -> None:
        if spec.keep:
            keeper = StoreKeeper(store, spec.keep)
            self._tasks.append(asyncio.create_task(keeper.run(), name="store keeper"))
        if spec.copy and self._is_first:
            client = MooncakeClient(spec.rpc_address)
            self._copies = StoreCopies(store, self._fleet, self._scheduler.in_flight, client, spec.copy)
            self._metrics.registry.register(self._copies)
            self._tasks.append(asyncio.create_task(self._copies.run(), name="store copies"))

    async def _look_after(self, under_way: set[Exchange]) -> None:
        settings = self._settings
        timeouts = Timeouts(
            settings.first_byte_timeout, settings.idle_timeout, settings.request_timeout, settings.stall_timeout
        )
        watchdog = Watchdog(timeouts, self._fleet.trip, under_way)
        now = time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL)
            if time.monotonic() - now > LATE * INTERVAL:  # it was this process that stood still
                await asyncio.sleep(INTERVAL)  # what was said meanwhile comes first
            now = time.monotonic()
            try:
                self._fleet.tick(now)
                watchdog.look(now)
                await self._clients.look(now)
                self._audit.look(now)
                self._core.take_in()
                self._missing_events.look(now)
            except Exception:  # without it nothing would ever be given up again
                logger.exception("Requests could not be looked after")

    def on_hangup(self) -> None:
        if self._reloading:
            self._reloading.reload()

    def on_signal(self, stop: asyncio.Event) -> None:
        """The first asks to drain, the second to end at once."""
        if stop.is_set():
            log_event(logger, logging.WARNING, "Second signal: ending at once", in_flight=self._busy)
            for connection in list(self._connections):
                connection.abort()
        stop.set()

    @property
    def _busy(self) -> int:
        return sum(connection.busy for connection in self._connections)

    async def drain(self, timeout: float) -> None:
        """Stop accepting, let running requests end, cut off those that outlast `timeout` seconds."""
        if self._server:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()
        if self._busy:
            log_event(logger, logging.INFO, "Draining", in_flight=self._busy, timeout=timeout)
        await self._idle_within(timeout)
        if self._busy:
            log_event(logger, logging.WARNING, "Requests outlast the drain timeout", cut_off=self._busy)
            for connection in list(self._connections):
                connection.drain()  # what is not here whole by now is not waited for
            reason = f"The router is stopping, and waited {timeout:g} s for the request to end (--drain-timeout)."
            for exchange in list(self._under_way):
                exchange.stop(503, reason)
            await self._idle_within(_LAST_WORDS)
        for connection in list(self._connections):
            connection.abort()

    async def _idle_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._busy and time.monotonic() < deadline:  # noqa: ASYNC110 -- an event would need counting per request
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._admin:
            await self._admin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._roster:
            await self._roster.close()
        if self._sockets:
            self._sockets.close()
        if self._copies:
            await self._copies.close()
        if self._store:
            await self._store.close()
        await self._ingest.close()
        await self._plane.close()
        if self._session:
            await self._session.close()


def _limits(settings: Settings) -> router.scheduling.limits.Limits:
    return router.scheduling.limits.Limits(
        settings.max_queue, settings.queue_timeout, settings.max_concurrency, settings.max_worker_concurrency
    )


def _client_limits(settings: Settings) -> Limits:
    return Limits(
        settings.max_body_size,
        settings.max_buffered,
        settings.max_connections,
        settings.client_timeout,
        settings.keep_alive_timeout,
    )


def _call_later(seconds: float, callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, callback)
