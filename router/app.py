"""Composition: every part of a router is made and wired here, and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

import aiohttp

from engines.endpoints import url_host
from indexer.kv_indexer import KVIndexer
from publishers.ending import end_tasks
from publishers.logs import log_event
from publishers.plane import EventPlane
from publishers.streams import say
from router.admin.access import by_keys
from router.admin.surface import AdminSurface
from router.arms import follows_events, make_arms, reads_engine_events, reads_prompts
from router.cli import Source, version
from router.context import RouterContext
from router.draining import Draining
from router.events.index_audit import IndexAudit
from router.events.ingest import Ingest
from router.events.missing_events import MissingEvents
from router.housekeeping import Chore, Housekeeping
from router.http.clients import Clients
from router.http.clients import Limits as ClientLimits
from router.http.front import Connection
from router.http.keep_alive import keep_alive
from router.http.pool import Pool
from router.http.protocol import for_loop
from router.metrics.gauges import Gauges
from router.metrics.registry import Metrics
from router.migration.migrating import Migrations
from router.open_files import OpenFiles
from router.openai.errors import error_response
from router.openai.kept_responses import KeptResponses
from router.outage import Outage
from router.own_pages import OwnPages
from router.policies import make_policy
from router.processes.member import Member, Sockets, share
from router.processes.sent import SentPrompts
from router.prompts import Prompts
from router.proxy.comments import Comments
from router.proxy.exchange import Exchange
from router.proxy.watchdog import Timeouts, Watchdog
from router.reloading import Reloading
from router.retry_budget import RetryBudget
from router.scheduling.admission import Admission, Objectives
from router.scheduling.backlog import Backlog
from router.scheduling.limits import Limits
from router.scheduling.load import LoadBook
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.security.security import Security
from router.security.tls import HANDSHAKE_TIMEOUT, FailedHandshakes
from router.server import Server
from router.settings import Settings
from router.split.pairing import counterparts, why_unpaired
from router.store.copies import StoreCopies
from router.store.keeper import StoreKeeper, handed_over, warm
from router.store.mooncake_client import MooncakeClient
from router.store.shared_store import SharedStore
from router.store.spec import StoreSpec
from router.tracing.setup import make_telemetry
from router.warm_up import warm_up
from router.workers.breaker import Breaker
from router.workers.fleet import Fleet
from router.workers.resources import Learn, WorkerResources
from router.workers.roster import Roster
from router.workers.spec import WorkerSpec
from router.workers.watch import WorkerWatch
from router.workers.worker import Worker

logger = logging.getLogger("router")

FIRST_CHECK = 5.0
"""Seconds that the router waits, before it listens, for workers to be looked at once; it serves without them after."""

BACKLOG = 65_535
"""Connections that may wait to be accepted, or as many as the system allows (`net.core.somaxconn`). Others are reset or
tried again after a second and more: thousands of clients come at once when another router ends."""

_NOT_READ = "With a broker, events= and replay= of a worker are not read: its publisher takes --events and --replay"


class App:
    """The whole router in one object. `start`, then `drain` and `close`."""

    def __init__(self, settings: Settings, member: Member | None = None, source: Source | None = None) -> None:
        """Compiles, the first time on a machine, what runs for each request. An event loop that handles signals would
        put them off meanwhile."""
        self._settings = settings
        self._source = source
        secret = secrets.randbits(63)
        self._metrics = Metrics(secret=secret)
        self._draw = random.Random(settings.seed)  # noqa: S311 -- not for secrets
        self._security = Security(settings, time.monotonic, self._metrics.deny)
        self._fleet = Fleet([])
        self._plane: EventPlane = self._security.make_plane()
        self._indexer = KVIndexer(
            settings.approx_ttl, settings.index_max_memory, self._metrics.lifecycle, secret=secret
        )
        shared = share(member) if member else None
        self._book = LoadBook(shared.load if shared else None)
        self._scheduler = Scheduler(
            make_policy(settings), self._book, self._draw, Backlog(shared.backlog if shared else None)
        )
        warm_up(
            self._scheduler,
            settings.store is not None,
            prompts=reads_prompts(settings),
            engine_events=reads_engine_events(settings),
        )
        self._queue = self._make_queue()
        self._ingest = Ingest(
            self._plane,
            settings.event_namespace,
            self._indexer,
            self._book,
            self._metrics,
            time.monotonic,
            knows=self._fleet.workers.__contains__,
            events=follows_events(settings),
        )
        namespace = None if settings.event_plane == "local" else settings.event_namespace
        self._missing_events = MissingEvents(self._fleet, self._indexer, self._plane, namespace)
        self._audit = IndexAudit(self._indexer, self._ingest.ask_anew, settings.store is not None)
        patience = settings.wait_for_worker
        self._outage = None if patience is None else Outage(patience, self._queue.limits)
        self._context = self._make_context(shared.sent if shared else None)
        self._migrations = self._make_migrations(settings.migration_limit)
        self._arms = make_arms(settings)
        refused = self._metrics.tallies.clients.refused
        self._clients: Clients[Connection] = Clients(_client_limits(settings), refused, time.time)
        if self._security.front:
            FailedHandshakes(refused, time.monotonic).watch(self._security.front)
        self._draining = Draining(self._clients.open)
        self._register_metrics()
        self._sockets = Sockets(member, self._metrics.page) if member else None
        self._heartbeat = shared.heartbeat if shared else None
        self._telemetry = make_telemetry(settings.otlp_traces_endpoint, version())
        self._is_first = member is None or member.number == 0
        self._tasks: list[asyncio.Task[None]] = []
        self._reloads: set[asyncio.Task[None]] = set()
        self.port = settings.port
        # Made by `start`:
        self._session: aiohttp.ClientSession | None = None
        self._responses: KeptResponses
        self._prompts: Prompts | None = None
        self._store: SharedStore | None = None
        self._copies: StoreCopies | None = None
        self._roster: Roster | None = None
        self._reloading: Reloading | None = None
        self._admin: AdminSurface | None = None
        self._housekeeping: Housekeeping | None = None
        self._server: asyncio.Server | None = None

    def _make_queue(self) -> Queue:
        settings = self._settings
        objectives = Objectives(settings.ttft_slo, settings.tbt_slo)
        admission = Admission(objectives, settings.slo_action, settings.slo_patience)
        return Queue(self._scheduler, admission, time.monotonic, _call_later, _limits(settings))

    def _make_context(self, sent: SentPrompts | None) -> RouterContext:
        settings = self._settings
        return RouterContext(
            fleet=self._fleet,
            book=self._book,
            scheduler=self._scheduler,
            queue=self._queue,
            indexer=self._indexer,
            metrics=self._metrics,
            clock=time.monotonic,
            retries=RetryBudget(settings.retry_budget, time.monotonic()),
            leg_timeout=settings.pd_timeout,
            has_store=settings.store is not None,
            audit=self._audit,
            missing_events=self._missing_events,
            outage=self._outage,
            sent=sent,
        )

    def _register_metrics(self) -> None:
        """What is read from the parts when /metrics is asked for."""
        metrics, tally = self._metrics, self._metrics.tallies.clients
        self._audit.register(metrics)
        if self._migrations:
            metrics.registry.register(self._migrations)
        Gauges(self._fleet, self._book, self._indexer, self._plane, time.monotonic).register(metrics)
        if self._arms:
            metrics.registry.register(self._arms)
        tiers = zip(("store", "disk", "cpu"), self._scheduler.loads, strict=True)
        metrics.lifecycle.loading = {tier: loads.tokens for tier, loads in tiers}
        metrics.tallies.queue.length = lambda: len(self._queue) + (self._outage.held if self._outage else 0)
        tally.connections, tally.buffered = self._clients.open.__len__, lambda: self._clients.buffered

    def _make_migrations(self, limit: int) -> Migrations | None:
        if not limit:
            return None
        return Migrations(limit, self._fleet, lambda model: self._prompts.ends(model) if self._prompts else None)

    async def start(self) -> None:
        """Look at the workers, then listen. OSError when the address cannot be listened on."""
        settings = self._settings
        if self._heartbeat:
            self._heartbeat.start(asyncio.get_running_loop().call_later)
        self._security.warn()
        self._scheduler.backlog.wanted = reads_prompts(settings)  # other modes do not ask
        self._session = self._security.make_session(self._fleet)
        self._responses = KeptResponses(self._fleet, self._session)
        await self._plane.start()
        await self._ingest.start()
        if reads_prompts(settings):
            self._prompts = self._make_prompts(self._session)
            self._store = self._make_store(self._session)
        self._roster = roster = self._make_roster(self._session)
        roster.take(settings.workers, settings.drain_timeout)
        if self._source:
            self._reloading = Reloading(self._source, settings, roster, self._security.read_again)
        await roster.first_checks(FIRST_CHECK)
        self._warn_of_unpaired()
        await self._administer(roster)
        await self._listen()

    def _make_prompts(self, session: aiohttp.ClientSession) -> Prompts:
        settings = self._settings
        folders, send_ids = settings.model_folder, settings.send_token_ids
        return Prompts(settings.tokenizer, self._context, session, folders, send_ids=send_ids)

    def _make_store(self, session: aiohttp.ClientSession) -> SharedStore | None:
        spec = self._settings.store
        if spec is None:
            return None
        folders, tls = self._settings.model_folder, self._security.workers.context
        store = SharedStore(spec, self._fleet, session, time.monotonic, folders, tls)
        self._metrics.registry.register(store)
        return store

    def _make_roster(self, session: aiohttp.ClientSession) -> Roster:
        settings = self._settings
        learners: list[Learn] = [part.learn for part in (self._prompts, self._store) if part]
        learners.append(partial(self._metrics.lifecycle.learn, folders=settings.model_folder))
        if self._store and settings.store and settings.store.warm:
            learners.append(partial(warm, session, store=self._store, number=settings.store.warm))
        resources = WorkerResources(
            settings,
            self._scheduler,
            self._indexer,
            self._metrics,
            self._plane,
            session,
            learners,
            [part.forget for part in (self._audit, self._missing_events, self._prompts) if part],
            reads_prompts=reads_prompts(settings),
            follow_events=follows_events(settings),
        )

        def watch(worker: Worker) -> WorkerWatch:
            return WorkerWatch(
                worker, self._fleet, session, settings.health_interval, resources.set_up, settings.event_host
            )

        over = partial(handed_over, store=self._store, indexer=self._indexer) if self._store else None
        return Roster(self._fleet, self._scheduler, resources, self._make_worker, watch, time.monotonic, over)

    def _make_worker(self, spec: WorkerSpec) -> Worker:
        settings, security = self._settings, self._security
        if settings.event_plane != "local" and (spec.events or spec.replay):
            log_event(logger, logging.WARNING, _NOT_READ, worker=spec.worker_id)
        pool = Pool(spec.url, settings.connect_timeout, security.workers.context, passing=security.answers_pass)
        breaker = Breaker(settings.breaker_failures, self._draw.random)
        return Worker(spec, pool, breaker, events_read=reads_engine_events(settings))

    async def _administer(self, roster: Roster) -> None:
        """What may change while the router runs: by its settings' file, and by its admin surface."""
        settings, source = self._settings, self._source
        if self._reloading and settings.watch_config and source and source.file:
            self._tasks.append(asyncio.create_task(self._reloading.watch(source.file), name="config file"))
        if settings.admin_listen:
            guard = self._security.guard
            authorize = by_keys(guard) if guard else None
            self._admin = AdminSurface(roster, self._context, settings.drain_timeout, authorize)
            await self._admin.start(settings.admin_listen, self._security.front)

    def _warn_of_unpaired(self) -> None:
        """Workers that are there for others which are not."""
        up = self._fleet.up
        others = counterparts(up)
        for worker in up:
            if why := why_unpaired(worker, others):
                log_event(logger, logging.WARNING, "A worker gets nothing to do", worker=worker.id, reason=why)

    async def _listen(self) -> None:
        settings, security, sockets = self._settings, self._security, self._sockets
        if sockets:
            await sockets.start()
        surface = self._make_surface()
        self._draining.exchanges = surface.under_way
        self._housekeeping = self._make_housekeeping(surface.under_way)
        self._tasks.append(asyncio.create_task(self._housekeeping.run(), name="housekeeping"))
        if self._store and settings.store:
            self._look_after_store(self._store, settings.store)
        admit = security.guard.refusal if security.guard else None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            for_loop(
                lambda: Connection(
                    surface.serve,
                    error_response,
                    self._clients,
                    loop.call_later,
                    security.passing,
                    admit,
                    security.origins,
                )
            ),
            settings.host,
            settings.port,
            backlog=BACKLOG,
            reuse_port=True if sockets else None,
            ssl=security.front,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT if security.front else None,
        )
        for listening in self._server.sockets:
            keep_alive(listening)
        self.port = self._server.sockets[0].getsockname()[1]
        host = url_host(settings.host)
        tell = sockets.tell if sockets else say
        tell(f"Listening on {'https' if security.front else 'http'}://{host}:{self.port}")

    def _make_surface(self) -> Server:
        settings, store, guard = self._settings, self._store, self._security.guard
        own_pages = OwnPages(
            self._context,
            int(time.time()),
            counts_prompts=self._prompts is not None,
            metrics_of_all=self._sockets.metrics_of_all if self._sockets else None,
            store=store,
            guard=guard,
        )
        return Server(
            self._context,
            self._prompts,
            own_pages,
            direct=settings.router_mode == "direct",
            arms=self._arms,
            store=store,
            guard=guard,
            tenant_header=settings.tenant_header.lower().encode() if settings.tenant_header else None,
            migrations=self._migrations,
            responses=self._responses,
            commented=settings.sse_keep_alive is not None,
            origins=self._security.origins,
            tracing=self._telemetry,
        )

    def _look_after_store(self, store: SharedStore, spec: StoreSpec) -> None:
        self._tasks.append(asyncio.create_task(store.run(), name="store names"))
        if spec.keep and self._is_first:
            keeper = StoreKeeper(store, spec.keep)
            self._tasks.append(asyncio.create_task(keeper.run(), name="store keeper"))
        if spec.copy and self._is_first:
            client = MooncakeClient(spec.rpc_address)
            self._copies = StoreCopies(store, self._fleet, self._scheduler.in_flight, client, spec.copy)
            self._metrics.registry.register(self._copies)
            self._tasks.append(asyncio.create_task(self._copies.run(), name="store copies"))

    def _make_housekeeping(self, under_way: set[Exchange]) -> Housekeeping:
        settings, context = self._settings, self._context
        timeouts = Timeouts(
            settings.first_byte_timeout, settings.idle_timeout, settings.request_timeout, settings.stall_timeout
        )
        chores: dict[str, Chore] = {
            "breakers": self._fleet.tick,
            "watchdog": Watchdog(timeouts, self._fleet.trip, under_way).tick,
            "clients": self._clients.tick,
            "open files": OpenFiles().tick,
            "index audit": self._audit.tick,
            "sent prompts": lambda _: context.apply_sent(),
            "missing events": self._missing_events.tick,
        }
        if self._store:
            chores["store"] = self._store.tick
        if self._outage:
            chores["outage"] = self._outage.tick
        if settings.sse_keep_alive is not None:
            chores["comments"] = Comments(settings.sse_keep_alive, under_way).tick
        return Housekeeping(chores, time.monotonic)

    def on_hangup(self) -> None:
        if self._reloading:
            task = asyncio.create_task(self._reloading.reload(), name="reload")
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    def on_signal(self, stop: asyncio.Event) -> None:
        """The first asks to drain, the second to end at once."""
        if stop.is_set():
            self.end_at_once()
        stop.set()

    def end_at_once(self) -> None:
        log_event(logger, logging.WARNING, "Second signal: ending at once", in_flight=self._draining.busy)
        self._draining.abort()

    async def drain(self, timeout: float) -> None:
        """Stop accepting, let running requests end, cut off those that outlast `timeout` seconds."""
        if self._server:
            self._server.close()
        if self._admin:
            await self._admin.free_port()
        await self._draining.drain(timeout)

    async def close(self) -> None:
        if self._admin:
            await self._admin.close()
        self._reloading = None  # a hangup that comes from now on changes nothing
        await end_tasks([*self._tasks, *self._reloads])
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
        if self._telemetry:
            await self._telemetry.close()


def _limits(settings: Settings) -> Limits:
    return Limits(settings.max_queue, settings.queue_timeout, settings.max_concurrency, settings.max_worker_concurrency)


def _client_limits(settings: Settings) -> ClientLimits:
    return ClientLimits(
        settings.max_body_size,
        settings.max_buffered,
        settings.max_connections,
        settings.client_timeout,
        settings.keep_alive_timeout,
    )


def _call_later(seconds: float, callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, callback)
