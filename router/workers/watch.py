"""Watches one worker: checks its health, and finds out what it is whenever it comes up."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import aiohttp
from msgspec.structs import replace

from engines import problems
from engines.description import EngineDescription, bases
from engines.disaggregation.mooncake import bootstrap_url, read_bootstrap
from engines.endpoints import confined
from engines.probe import probe, read_models
from engines.vllm import sleep
from publishers.dialogue import TIMED_OUT, converse, fetch
from publishers.logs import log_event
from publishers.reasons import LATE
from publishers.turns import until_turn
from router.scheduling.places import NoPlace
from router.split.pairing import lack
from router.workers.fleet import Fleet
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_SLOW_CHECKS = 3
"""Health checks in a row that must time out before a worker counts as down: a busy engine may answer late. A refused
connection or a bad status counts at once."""

_MODELS_EVERY = 5
"""Health checks after which a worker is asked again for its models: adapters come and go while it runs."""

DESCRIBE_TIMEOUT = 5.0
"""Seconds for each request that finds out what a worker is."""
_MOST_LATE = 3
"""Attempts in a row to find that out in which a request is not answered in time, after which the rest must do."""

ASLEEP = "is asleep or paused"

OnDescribed = Callable[[Worker], Awaitable[None]]


class WorkerWatch:
    def __init__(
        self,
        worker: Worker,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        interval: float,
        on_described: OnDescribed,
        event_hosts: Collection[str] = (),
    ) -> None:
        """`event_hosts`: see `describe`."""
        self._worker = worker
        self._fleet = fleet
        self._session = session
        self._interval = interval
        self._on_described = on_described
        self._event_hosts = event_hosts
        self._slow = self._slow_bootstrap = 0
        """Checks in a row in which /health, or the bootstrap server, did not answer in time."""
        self._rounds = 0
        """Checks that it passed while it was up: at every `_MODELS_EVERY`-th it is asked for its models."""
        self._late = 0
        """Attempts in a row to find out what it is that were not all answered in time."""
        self._logged: set[str] = set()
        """Troubles that were logged since it was last healthy: each is logged once, even if they alternate."""
        self.first_check = asyncio.Event()
        """Set once the worker was checked, whatever the result."""
        self.stale = False
        """What is known of the worker is out of date: the next check finds it out anew."""
        self._tells_sleep = False
        """Its engine answers whether it is asleep."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._round()
            except Exception:  # else the worker would count for ever as what it was before
                logger.exception("A worker could not be looked at", extra={"fields": {"worker": self._worker.id}})
            self.first_check.set()
            await asyncio.sleep(until_turn(self._worker.id, self._interval, asyncio.get_running_loop().time()))

    async def _round(self) -> None:
        self._worker.pool.close_expired()
        trouble = await self._check()
        if trouble is None:
            await self._ask_bootstrap()
        if trouble is None and (self.stale or not self._worker.up):
            trouble = await self._come_up()
        elif trouble is None:
            await self._ask_models()
        if trouble is None:
            self._logged.clear()
        elif self._worker.up:
            self._fleet.mark_down(self._worker, trouble)
            self._logged.add(trouble)
        else:
            self._stay_down(trouble)

    def _stay_down(self, trouble: str) -> None:
        worker = self._worker
        if trouble not in self._logged and trouble != worker.trouble:
            log_event(logger, logging.WARNING, "Worker is not up", worker=worker.id, trouble=trouble)
        self._logged.add(trouble)
        worker.trouble = trouble

    async def _check(self) -> str | None:
        """What is wrong with the worker; None when it is healthy, or has not been slow for long enough."""
        answer, why = await fetch(self._session, self._worker.spec.url, "/health", self._interval)
        if answer.status == TIMED_OUT:
            self._slow += 1
            patient = self._worker.up and self._slow < _SLOW_CHECKS
            return None if patient else f"/health did not answer within {self._interval:g} s"
        self._slow = 0
        if answer.status == 0:
            return why
        if answer.status == 404:
            return "/health answered 404, as no engine does: is the URL right?"
        if answer.status != 200:
            return f"/health answered {answer.status}"
        return ASLEEP if self._tells_sleep and await self._is_asleep() else None

    async def _is_asleep(self) -> bool:
        timeout = min(self._interval, DESCRIBE_TIMEOUT)
        answer, _ = await fetch(self._session, self._worker.spec.url, sleep.PATH, timeout)
        if answer.status > 0:
            self._tells_sleep = answer.status == 200
        return sleep.is_asleep(answer)

    async def _ask_bootstrap(self) -> None:
        """Ask for its engine ids each time: they change with each restart, which may take less than a check's
        interval. They hold while it has not been slow for long enough."""
        worker = self._worker
        if worker.connector != "mooncake" or worker.role != "prefill":
            return
        url = bootstrap_url(worker.prefiller(0))
        answer, _ = await fetch(self._session, url, "/query", self._interval)
        self._slow_bootstrap = self._slow_bootstrap + 1 if answer.status == TIMED_OUT else 0
        if worker.up and 0 < self._slow_bootstrap < _SLOW_CHECKS:
            return
        self._fleet.learn_engine_ids(worker, read_bootstrap(answer.body) if answer.status == 200 else {})

    async def _ask_models(self) -> None:
        """See which adapters it serves now. Another base model means another engine, which the next check finds out."""
        self._rounds += 1
        worker, known = self._worker, self._worker.description
        if known is None or self._rounds % _MODELS_EVERY:
            return
        answer, _ = await fetch(self._session, worker.spec.url, "/v1/models", self._interval)
        models = read_models(known.kind, answer)
        if not models or models == known.models:
            return
        if bases(models) != bases(known.models):
            self.stale = True
            return
        self._fleet.redescribe(worker, replace(known, models=models))
        names = ",".join(model.id for model in models)
        log_event(logger, logging.INFO, "Worker serves other adapters", worker=worker.id, models=names)

    async def _come_up(self) -> str | None:
        """Find out what it is and prepare everything for it. Returns what went wrong, if so; the next check tries
        again."""
        worker, self.stale = self._worker, False
        found = await describe(self._session, worker, self._event_hosts)
        if problems.NO_ANSWER in found.problems:
            return "answers /health, but not what it is"
        if found.kind == "vllm" and await self._is_asleep():
            return ASLEEP
        self._late = self._late + 1 if problems.LATE in found.problems else 0
        if 0 < self._late < _MOST_LATE:  # taken in now, it would stay half known for as long as it is up
            self.stale = worker.up
            return None if worker.up else "answers /health, but not in time what it is"
        self._late = 0  # when it has restarted, it may well tell all again
        self._fleet.redescribe(worker, found)  # first, since it says for which ranks books are kept from now on
        try:
            await self._on_described(worker)
        except NoPlace as full:
            return f"could not be taken in: {full}"
        except Exception as error:
            logger.exception("A worker could not be taken in", extra={"fields": {"worker": worker.id}})
            return f"could not be taken in: {type(error).__name__}"
        self._fleet.mark_up(worker)
        self._log_up(found)
        return None

    def _log_up(self, found: EngineDescription) -> None:
        worker = self._worker
        log_event(
            logger,
            logging.INFO,
            "Worker is up",
            worker=worker.id,
            engine=found.kind,
            models=",".join(model.id for model in found.models),
            block_size=worker.block_size,
            ranks=found.dp_size,
            events=worker.has_events,
            role=worker.role,
        )
        for problem in worker.problems:
            log_event(logger, logging.WARNING, problem, worker=worker.id)
        lacking = lack(worker) if worker.role == "prefill" else None
        if lacking:
            log_event(logger, logging.WARNING, f"The worker cannot hand over: {lacking}", worker=worker.id)


async def describe(
    session: aiohttp.ClientSession, worker: Worker, event_hosts: Collection[str] = ()
) -> EngineDescription:
    """What the engine says of itself; `problems` has `NO_ANSWER` if it does not answer. `event_hosts`: hosts other than
    its own at which it may claim to publish events."""
    host = worker.pool.address.host
    # Else one broken connection would leave the worker half known for as long as it is up.
    found, trouble = await converse(probe(host), session, worker.spec.url, DESCRIBE_TIMEOUT, twice=True)
    found = confined(found, host, event_hosts)
    late = (problems.LATE,) if LATE in trouble else ()
    number = await _addresses(host)
    several = (problems.several_addresses(host, number),) if number > 1 else ()
    return replace(found, problems=(*found.problems, *late, *several))


async def _addresses(host: str) -> int:
    """How many it has of one kind: one of IPv4 and one of IPv6 are most often the same machine's."""
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the engine was reached all the same, or will not be
        return 0
    return max(Counter(family for family, _ in {(family, where[0]) for family, *_, where in found}).values())
