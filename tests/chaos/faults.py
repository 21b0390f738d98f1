"""What goes wrong: one method for each kind of fault, that makes it, counts it when it had an effect, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from tests.chaos.actors import Actor
from tests.chaos.answers import Wrong, judge
from tests.chaos.fleet import GONE, Fleet, WorkerActor
from tests.chaos.ledger import Ledger
from tests.chaos.load import Asker
from tests.chaos.questions import LEAST_TOKENS, Questions
from tests.chaos.router_actor import RouterActor
from tests.chaos.ward import Ward

STRUCK_WITHIN = 1.0
"""Seconds that an armed fault waits for its request."""
RECOVERY = 1.0
"""Seconds that a worker must be well before the next falls ill: what failed at one may just be tried at the other."""
RETURNS_WITHIN = 10.0
"""Seconds in which a worker that is back must serve again."""

INJECTED = ("error429", "error500", "error503", "drop_before_first_byte", "break_after_tokens")


class Faults:
    def __init__(self, fleet: Fleet, ward: Ward, ledger: Ledger, draw: random.Random) -> None:
        self._fleet = fleet
        self._ward = ward
        self._ledger = ledger
        self._draw = draw
        self._questions = Questions(draw)
        self._router_busy = False
        self._nats_busy = False
        self._publishers_busy: set[Actor] = set()
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            **{kind: self._injected(kind) for kind in INJECTED},
            **{kind: getattr(self, f"_{kind}") for kind in OTHERS},
        }

    def _seconds(self, least: float, most: float) -> float:
        return self._draw.uniform(least, most)

    @contextlib.asynccontextmanager
    async def _patient(self, alone: bool = False) -> AsyncIterator[WorkerActor | None]:
        number = self._ward.admit(alone)
        if number is None:
            yield None
            return
        try:
            yield self._fleet.workers[number]
            await asyncio.sleep(RECOVERY)
        finally:
            self._ward.discharge(number, alone)

    # -- what engines answer

    def _injected(self, kind: str) -> Callable[[], Awaitable[None]]:
        async def inject() -> None:
            async with self._patient() as worker:
                if worker:
                    after = self._draw.randrange(LEAST_TOKENS - 1)
                    await self._arm(worker, kind=kind, count=self._draw.randint(1, 5), after=after)

        return inject

    async def _arm(self, worker: WorkerActor, **fault: object) -> bool:
        """Whether all of it found its request."""
        session, end = self._fleet.session, time.monotonic() + STRUCK_WITHIN
        try:
            await worker.arm(session, **fault)
            while await worker.collect(session, self._ledger):
                if time.monotonic() > end:
                    await worker.disarm(session)
                    return False
                await asyncio.sleep(0.2)
        except GONE:
            return False  # it has died of something else
        return True

    async def _hang(self) -> None:
        """An engine that takes a request and never answers. Where nobody loses patience its connection breaks later."""
        async with self._patient() as worker:
            if worker and await self._arm(worker, kind="hang"):
                await asyncio.sleep(self._seconds(0.5, 8))
                worker.proxy.cut()

    async def _slow(self) -> None:
        async with self._patient() as worker:
            if not worker:
                return
            with contextlib.suppress(*GONE):
                await worker.arm(self._fleet.session, kind="slow", factor=self._seconds(2, 10))
                self._ledger.fault("slow", worker.name)
                await asyncio.sleep(self._seconds(0.5, 2))
            await worker.disarm(self._fleet.session)

    # -- between the router and a worker

    async def _cut(self) -> None:
        async with self._patient() as worker:
            if worker and worker.proxy.cut():
                self._ledger.fault("cut", worker.name)
                await asyncio.sleep(0.2)

    async def _stall(self) -> None:
        async with self._patient(alone=True) as worker:
            if not worker:
                return
            direction = self._draw.choice(("up", "down", "both"))
            worker.proxy.stall(True, direction)  # type: ignore[arg-type]
            self._ledger.fault("stall", f"{worker.name} {direction}")
            await asyncio.sleep(self._seconds(0.5, 3))
            worker.proxy.stall(False)
            await self._serves_again(worker)

    async def _delay(self) -> None:
        async with self._patient() as worker:
            if worker:
                worker.proxy.delay(self._seconds(0.02, 0.2), self._seconds(0, 0.1))
                self._ledger.fault("delay", worker.name)
                await asyncio.sleep(self._seconds(0.5, 2))
                worker.proxy.delay(0)

    async def _throttle(self) -> None:
        async with self._patient() as worker:
            if worker:
                worker.proxy.throttle(self._seconds(2_000, 20_000))
                self._ledger.fault("throttle", worker.name)
                await asyncio.sleep(self._seconds(0.5, 2))
                worker.proxy.throttle(None)

    async def _lossy(self) -> None:
        async with self._patient() as worker:
            if worker:
                worker.proxy.drop(self._seconds(0.01, 0.1))
                self._ledger.fault("lossy", worker.name)
                await asyncio.sleep(self._seconds(0.5, 2))
                worker.proxy.drop(0)

    async def _refuse(self) -> None:
        """It cannot be reached any more, and what was connected is cut."""
        async with self._patient(alone=True) as worker:
            if worker:
                worker.proxy.refuse(True)
                worker.proxy.cut()
                self._ledger.fault("refuse", worker.name)
                await asyncio.sleep(self._seconds(0.2, 2))
                worker.proxy.refuse(False)
                await self._serves_again(worker)

    # -- processes

    async def _worker_kill(self) -> None:
        async with self._patient(alone=True) as worker:
            if worker:
                self._ledger.fault("worker_kill", worker.name)
                await worker.actor.kill()
                await asyncio.sleep(self._seconds(0, 1))
                await worker.start(self._fleet.session)
                await self._serves_again(worker)

    async def _worker_stop(self) -> None:
        async with self._patient(alone=True) as worker:
            if worker:
                await self._freeze(worker.actor.send, "worker_stop", worker.name)
                await self._serves_again(worker)

    async def _freeze(self, send: Callable[[signal.Signals], object], kind: str, name: str) -> None:
        self._ledger.fault(kind, name)
        send(signal.SIGSTOP)
        await asyncio.sleep(self._seconds(0.3, 7))
        send(signal.SIGCONT)

    async def _publisher_kill(self) -> None:
        async with self._idle_publisher() as publisher:
            if publisher:
                self._ledger.fault("publisher_kill", publisher.name)
                await publisher.kill()
                await asyncio.sleep(self._seconds(0, 1))
                await publisher.start()

    async def _publisher_stop(self) -> None:
        async with self._idle_publisher() as publisher:
            if publisher:
                await self._freeze(publisher.send, "publisher_stop", publisher.name)

    @contextlib.asynccontextmanager
    async def _idle_publisher(self) -> AsyncIterator[Actor | None]:
        idle = [each for each in self._fleet.publishers if each not in self._publishers_busy]
        chosen = self._draw.choice(idle) if idle else None
        if chosen is None:
            yield None
            return
        self._publishers_busy.add(chosen)
        try:
            yield chosen
        finally:
            self._publishers_busy.discard(chosen)

    async def _nats_kill(self) -> None:
        nats = self._fleet.nats
        if nats is None or self._nats_busy:
            return
        self._nats_busy = True
        self._ledger.fault("nats_kill", "")
        assert nats._process is not None
        nats._process.kill()
        await nats.stop()
        await asyncio.sleep(self._seconds(0, 1))
        await nats.start()
        self._nats_busy = False

    async def _nats_stop(self) -> None:
        nats = self._fleet.nats
        if nats is None or self._nats_busy:
            return
        self._nats_busy = True
        self._ledger.fault("nats_stop", "")
        assert nats._process is not None
        nats._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._seconds(0.3, 4))
        nats._process.send_signal(signal.SIGCONT)
        self._nats_busy = False

    async def _router_kill(self) -> None:
        await self._end_router("router_kill")

    async def _router_drain(self) -> None:
        await self._end_router("router_drain")

    async def _end_router(self, kind: str) -> None:
        async with self._router_alone() as router:
            if router is None:
                return
            self._ledger.fault(kind, "")
            if kind == "router_kill":
                await router.kill()
            elif status := await router.drain():
                self._ledger.violate(f"the router ended with status {status} on SIGTERM")
            await router.start()
            with contextlib.suppress(*GONE):
                await router.serving(self._fleet.session)
            await asyncio.sleep(1)

    async def _router_stop(self) -> None:
        async with self._router_alone() as router:
            if router:
                await self._freeze(router.actor.send, "router_stop", router.actor.name)
                await asyncio.sleep(1)

    async def _process_kill(self) -> None:
        async with self._router_alone() as router:
            if router:
                self._ledger.fault("process_kill", "")
                await router.kill_process(self._fleet.session, self._draw)

    async def _process_stop(self) -> None:
        async with self._router_alone() as router:
            if router:
                pid = self._draw.choice(router.actor.children)
                await self._freeze(partial(os.kill, pid), "process_stop", f"{pid}")

    async def _hangup(self) -> None:
        """A worker leaves the settings, and comes back."""
        async with self._patient(alone=True) as worker:
            async with self._router_alone() as router:
                if not worker or not router:
                    return
                self._ledger.fault("hangup", worker.name)
                for without in (worker, None):
                    self._fleet.state_workers(without)
                    router.actor.send(signal.SIGHUP)
                    await asyncio.sleep(self._seconds(0, 3))
            await self._serves_again(worker)

    @contextlib.asynccontextmanager
    async def _router_alone(self) -> AsyncIterator[RouterActor | None]:
        """None while something else is done to it."""
        if self._router_busy:
            yield None
            return
        self._router_busy = True
        try:
            yield self._fleet.router
        finally:
            self._router_busy = False

    # -- afterwards

    async def _serves_again(self, worker: WorkerActor) -> None:
        self._ward.returning.add(worker.number)
        await worker.disarm(self._fleet.session)  # what it was told while it was frozen it knows only now
        await self._until_it_serves(worker)
        self._ward.returning.discard(worker.number)

    async def _until_it_serves(self, worker: WorkerActor) -> None:
        """Until the router has a request answered by it. Void when the router itself was not there all the time."""
        router, began = self._fleet.router, time.monotonic()
        starts, target = router.starts, b"x-router-target-worker: " + worker.name.encode()
        while router.starts == starts and router.up.is_set() and not self._router_busy:
            asker, question = Asker(router, self._draw), self._questions.next(streamed=False)
            with contextlib.suppress(OSError, EOFError, TimeoutError, Wrong):
                if judge(question, await asker.ask(question, "usual", target)) == "answered":
                    self._ledger.returns.append(time.monotonic() - began)
                    asker.close()
                    return
            asker.close()
            if time.monotonic() - began > RETURNS_WITHIN:
                self._ledger.violate(f"{worker.name} was back, and did not serve within {RETURNS_WITHIN:g} s")
                return
            await asyncio.sleep(0.1)


OTHERS = (
    *("hang", "slow", "cut", "stall", "delay", "throttle", "lossy", "refuse", "worker_kill", "worker_stop"),
    *("publisher_kill", "publisher_stop", "nats_kill", "nats_stop", "router_kill", "router_drain", "router_stop"),
    *("process_kill", "process_stop", "hangup"),
)
