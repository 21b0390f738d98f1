"""The watched workers, which join, change, drain and leave while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from publishers.ending import end_tasks
from publishers.logs import log_event
from router.scheduling.scheduler import Scheduler
from router.workers.fleet import Fleet
from router.workers.resources import WorkerResources
from router.workers.spec import ROLE_FIELDS, WorkerSpec
from router.workers.watch import WorkerWatch
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_POLL = 0.02
"""Seconds between two checks of what a leaving worker still has in flight. An event would cost something per
request."""
_MOST_POLLS = 1000
"""Such checks a second, of all that leave together: those of a whole fleet would take a quarter of a core."""
_HAND_OVER, _HAND_OVER_POLL = 10.0, 0.2
"""Seconds that a leaving worker without requests stays until its hot prefixes are in the shared store, and between two
checks of that."""
_MOST_HAND_OVERS = 25
"""Such checks a second, of all that leave together: each takes milliseconds."""
_NEWCOMERS = 5.0
"""Seconds that workers which are no longer stated go on at most, until those that join in their place were looked at:
were all of a fleet replaced at once, nobody would serve meanwhile."""
_CUT_OFF_GRACE = 1.0
"""Seconds in which requests that were cut off must end or move to another worker; most do so at once."""


class Conflict(Exception):
    """Why a change of the fleet is not possible, in one sentence."""


class _Watched(NamedTuple):
    watch: WorkerWatch
    task: asyncio.Task[None]


class _Leaving:
    """A worker that is to be removed."""

    def __init__(self, deadline: float, task: asyncio.Task[None]) -> None:
        self.deadline = deadline
        """When it is removed at the latest."""
        self.task = task
        """Removes it."""
        self.committed = False
        """There is no way back."""


class Roster:
    """A worker that leaves is drained first. One that joins later with the same name inherits nothing from it."""

    def __init__(
        self,
        fleet: Fleet,
        scheduler: Scheduler,
        resources: WorkerResources,
        make_worker: Callable[[WorkerSpec], Worker],
        make_watch: Callable[[Worker], WorkerWatch],
        clock: Callable[[], float],
        handed_over: Callable[[Worker], Awaitable[bool]] | None = None,
    ) -> None:
        """`clock`: seconds on a steady clock. `handed_over`: whether a leaving worker's hot prefixes are in the shared
        store."""
        self._fleet = fleet
        self._scheduler = scheduler
        self._resources = resources
        self._make_worker = make_worker
        self._make_watch = make_watch
        self._clock = clock
        self._handed_over = handed_over
        self._watched: dict[str, _Watched] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._successors: dict[str, WorkerSpec] = {}
        """By name, the worker that will join as soon as the leaving worker of that name is gone."""
        self._stated: tuple[WorkerSpec, ...] = ()
        self._looks: set[asyncio.Task[None]] = set()

    # -- one worker

    def join(self, spec: WorkerSpec) -> Worker:
        """It gets requests once its health was checked. Raises Conflict when its name or its URL is taken."""
        self._refuse_twice(spec)
        worker = self._make_worker(spec)
        self._fleet.add(worker)
        watch = self._make_watch(worker)
        self._watched[worker.id] = _Watched(watch, asyncio.create_task(watch.run(), name=f"watch of {worker.id}"))
        log_event(logger, logging.DEBUG, "Worker has joined", worker=worker.id, url=spec.url)
        return worker

    def _refuse_twice(self, spec: WorkerSpec) -> None:
        known = self._fleet.workers.get(spec.worker_id)
        if known:
            leaves = " It is leaving; its name is free when it has left." if known.id in self._leaving else ""
            raise Conflict(f"There is a worker {known.id!r} already, at {known.spec.url}.{leaves}")
        self._refuse_taken(spec.url)

    def _refuse_taken(self, url: str) -> None:
        """A leaving worker's URL is free."""
        for worker in self._fleet.workers.values():
            if worker.spec.url == url and worker.id not in self._leaving:
                raise Conflict(f"The worker at {url} is here already, as {worker.id!r}.")

    def restate(self, worker: Worker, spec: WorkerSpec) -> None:
        """Take over what the settings now say of `worker`, apart from its name and URL. Roles apply from the next
        request on, the rest from its next health check on."""
        before = worker.spec
        self._fleet.restate(worker, spec)
        if _without_role(before) != _without_role(spec):
            self._watched[worker.id].watch.stale = True

    def drain(self, worker: Worker, draining: bool) -> None:
        """Start or stop draining `worker`: it gets no new requests, and those in flight go on. Raises Conflict when it
        is too late to stop, or another worker has its URL by now."""
        if not draining:
            self._call_back(worker)
        if worker.draining != draining:
            message = "Worker drains" if draining else "Worker drains no more"
            log_event(logger, logging.INFO, message, worker=worker.id, in_flight=self.in_flight(worker))
        self._fleet.drain(worker, draining)

    def _call_back(self, worker: Worker) -> None:
        leaving = self._leaving.get(worker.id)
        if leaving is None:
            return
        if leaving.committed:
            raise Conflict(f"Worker {worker.id!r} is just leaving.")
        self._refuse_taken(worker.spec.url)
        del self._leaving[worker.id]
        self._successors.pop(worker.id, None)
        leaving.task.cancel()

    def leave(self, worker: Worker, timeout: float) -> None:
        """Drain it, and remove it when nothing is in flight there, or after `timeout` seconds, when what is left is cut
        off. A second call sets the deadline anew."""
        self.drain(worker, True)
        self._leave(worker, timeout, None)

    def _leave(self, worker: Worker, timeout: float, after: asyncio.Task[None] | None) -> None:
        """It drains when `after` is done."""
        deadline = self._clock() + timeout
        leaving = self._leaving.get(worker.id)
        if leaving:
            leaving.deadline = deadline
            return
        task = asyncio.create_task(self._remove_once_idle(worker, after), name=f"leaving of {worker.id}")
        self._leaving[worker.id] = _Leaving(deadline, task)

    def _is_committed(self, worker: Worker) -> bool:
        """Whether it leaves, and there is no way back."""
        leaving = self._leaving.get(worker.id)
        return leaving is not None and leaving.committed

    def leaves_in(self, worker: Worker) -> float | None:
        """Seconds until it is removed at the latest; None when it is not leaving."""
        leaving = self._leaving.get(worker.id)
        if leaving is None:
            return None
        return 0.0 if leaving.committed else max(0.0, leaving.deadline - self._clock())

    def in_flight(self, worker: Worker) -> int:
        """Requests that it is serving."""
        return sum(self._scheduler.in_flight(rank) for rank in worker.ranks)

    async def _remove_once_idle(self, worker: Worker, after: asyncio.Task[None] | None) -> None:
        leaving = self._leaving[worker.id]
        if after:
            while not after.done() and self._clock() < leaving.deadline:  # which may be set anew meanwhile
                await asyncio.wait((after,), timeout=self._pause(_POLL, _MOST_POLLS))
            self.drain(worker, True)
        while self.in_flight(worker) and self._clock() < leaving.deadline:  # noqa: ASYNC110 -- see _POLL
            await asyncio.sleep(self._pause(_POLL, _MOST_POLLS))
        await self._hand_over(worker, leaving)
        leaving.committed = True
        await end_tasks([self._watched.pop(worker.id).task])
        cut = await self._cut_off(worker)
        await self._discard(worker)
        self._fleet.remove(worker)
        self._resources.keep_tallies(self._fleet.workers)
        del self._leaving[worker.id]
        log_event(logger, logging.INFO, "Worker has left", worker=worker.id, cut_off=cut)
        successor = self._successors.pop(worker.id, None)
        if successor:
            self._if_free(successor, self.join)

    def _pause(self, least: float, most: int) -> float:
        """Seconds between two checks of each worker that leaves; all of them together make `most` a second."""
        return max(least, len(self._leaving) / most)

    async def _hand_over(self, worker: Worker, leaving: _Leaving) -> None:
        """Wait for its hot prefixes: engines put what they computed into a shared store only after the request
        ended."""
        until = self._clock() + _HAND_OVER

        def left() -> float:  # the deadline may be set anew meanwhile
            return max(0.0, min(leaving.deadline, until) - self._clock())

        try:
            while self._handed_over and (seconds := left()):
                async with asyncio.timeout(seconds):  # a slow store may take long to answer
                    if await self._handed_over(worker):
                        return
                await asyncio.sleep(min(left(), self._pause(_HAND_OVER_POLL, _MOST_HAND_OVERS)))
        except TimeoutError:
            return
        except Exception:  # whatever it is, nobody stays for it
            logger.exception("What a worker holds could not be handed over", extra={"fields": {"worker": worker.id}})

    async def _cut_off(self, worker: Worker) -> int:
        """Cut off what is still in flight; returns how many requests that were."""
        cut = self.in_flight(worker)
        worker.pool.cut("it was removed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_OFF_GRACE):
                while self.in_flight(worker):  # noqa: ASYNC110 -- see _POLL
                    await asyncio.sleep(_POLL)
        return cut

    async def _discard(self, worker: Worker) -> None:
        try:
            await self._resources.discard(worker)
        except Exception:  # whatever it is: it would never be gone, and its name never free
            logger.exception(
                "What a worker leaves behind is not all discarded", extra={"fields": {"worker": worker.id}}
            )

    # -- all of them

    def take(self, specs: Sequence[WorkerSpec], timeout: float) -> list[str]:
        """Apply the workers that the settings now list: new ones join, missing ones leave within `timeout` seconds, and
        changed ones change; returns the names of all these. Workers that are listed as before are left alone, even if
        they were changed otherwise since."""
        before, now = ({spec.worker_id: spec for spec in each} for each in (self._stated, specs))
        self._stated = tuple(specs)
        gone = [name for name in before if name not in now]
        after = self._looked_at_those_to_join() if gone and not now.keys() <= before.keys() else None
        for name in gone:
            self._successors.pop(name, None)
            worker = self._fleet.workers.get(name)
            if worker and after and name not in self._leaving:
                self._leave(worker, timeout, after)  # its address is free from now on
            elif worker:
                self.leave(worker, timeout)
        changed = [spec for name, spec in now.items() if before.get(name) != spec]
        for spec in sorted(changed, key=self._turn):
            self._take_one(spec, timeout)
        return [*gone, *(spec.worker_id for spec in changed)]

    def _looked_at_those_to_join(self) -> asyncio.Task[None]:
        """Ends when the workers that join from now on, before it begins, were looked at once, or after a while."""
        here = set(self._watched)

        async def look() -> None:
            newcomers = [each.watch for name, each in self._watched.items() if name not in here]
            await _looked_at(newcomers, _NEWCOMERS)

        task = asyncio.create_task(look(), name="a look at newcomers")
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)
        return task

    def _turn(self, spec: WorkerSpec) -> int:
        """The order of changes: first workers that move to another URL, since they free theirs for one that stays or
        joins."""
        worker = self._fleet.workers.get(spec.worker_id)
        if worker is None:
            return 2
        return 1 if worker.spec.url == spec.url else 0

    def _take_one(self, spec: WorkerSpec, timeout: float) -> None:
        worker = self._fleet.workers.get(spec.worker_id)
        if worker is None:
            self._if_free(spec, self.join)
        elif worker.spec.url != spec.url or self._is_committed(worker):
            self._successors[worker.id] = spec
            self.leave(worker, timeout)
        else:
            self._successors.pop(worker.id, None)
            self._if_free(spec, partial(self._stay, worker))

    def _stay(self, worker: Worker, spec: WorkerSpec) -> None:
        if worker.id in self._leaving:
            self.drain(worker, False)
        self.restate(worker, spec)

    def _if_free(self, spec: WorkerSpec, take: Callable[[WorkerSpec], object]) -> None:
        try:
            take(spec)
        except Conflict as conflict:
            log_event(logger, logging.ERROR, "A worker cannot join", worker=spec.worker_id, reason=conflict)
            self._stated = tuple(one for one in self._stated if one != spec)  # the next reload tries again

    async def first_checks(self, patience: float) -> None:
        """Returns when each worker's health was checked once, or after `patience` seconds."""
        await _looked_at([watched.watch for watched in self._watched.values()], patience)

    async def close(self) -> None:
        """Stop watching all workers at once."""
        leaving = [each.task for each in self._leaving.values()]
        await end_tasks([*self._looks, *leaving, *(watched.task for watched in self._watched.values())])
        await self._resources.close()
        for worker in self._fleet.workers.values():
            worker.pool.close()


def _without_role(spec: WorkerSpec) -> WorkerSpec:
    return msgspec.structs.replace(spec, **dict.fromkeys(ROLE_FIELDS))


async def _looked_at(watches: Collection[WorkerWatch], patience: float) -> None:
    """Returns when each worker's health was checked once, or after `patience` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await asyncio.gather(*(watch.first_check.wait() for watch in watches))
