"""What must hold when all faults are over and nobody asks any more."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.chaos.fleet import GONE, Fleet
from tests.chaos.ledger import Ledger

PATIENCE = 30.0
"""Seconds. Connections of the router's own that nobody uses are closed after 15 (aiohttp's keepalive_timeout)."""
SPARE_DESCRIPTORS = 4
"""ZMQ and NATS may just be connecting anew."""
MOST_GROWTH = 64.0
"""Megabytes between two moments of rest: far above what an allocator keeps, far below a leak under thousands of
requests."""

_IDLE = ("router_requests_in_flight", "router_load_requests", "router_load_prefill_tokens", "router_load_active_tokens")


class Rest(NamedTuple):
    """The router at rest, without connections that it keeps for later."""

    start: int
    descriptors: int
    tasks: dict[str, int]
    megabytes: float


class Settling:
    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._first: Rest | None = None

    async def check(self) -> None:
        """Each within PATIENCE, else it is a violation."""
        await self._holds("The workers serve", self._serving)
        await self._holds("Nothing is booked", self._booked)
        await self._holds("No engine works on anything", self._engines)
        if self._fleet.router.processes > 1:
            await self._holds("Each process knows how much the engines hold", self._indexes)
        else:
            await self._holds("The index is what the engines hold", self._index)
            await self._holds("Nothing is left open", self._open)
        for actor in self._fleet.actors:
            if not actor.alive:
                self._ledger.violate(f"{actor.name} has died by itself")
        for actor in (self._fleet.router.actor, *self._fleet.publishers):
            if "Traceback" in actor.log:
                self._ledger.violate(f"an exception in {actor.log_path.name}: {_last_traceback(actor.log)}")

    async def _holds(self, what: str, look: Callable[[], Awaitable[str]]) -> None:
        """`look` says what is wrong, if anything."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                wrong = await look()
            except GONE as error:
                wrong = repr(error)
            if not wrong:
                return
            if time.monotonic() > end:
                self._ledger.violate(f"{what}: not within {PATIENCE:g} s: {wrong}")
                return
            await asyncio.sleep(0.2)

    async def _serving(self) -> str:
        workers = await self._fleet.router.ready(self._fleet.session)
        return ", ".join(f"{worker['id']}: {worker['trouble']}" for worker in workers if not worker["up"])

    async def _booked(self) -> str:
        metrics = await self._fleet.router.metrics(self._fleet.session)
        left = {name: metrics[name] for name in _IDLE if metrics[name]}
        queue = (await self._fleet.router.tell())["queue"] if self._fleet.router.processes == 1 else 0
        return str({**left, "queue": queue}) if left or queue else ""

    async def _engines(self) -> str:
        wrong = []
        for worker in self._fleet.workers:
            page = await worker.get(self._fleet.session, "/metrics")
            if re.search(r"^vllm:num_requests_(running|waiting)\S* [^0]", page, re.MULTILINE):
                wrong.append(worker.name)
        return ", ".join(wrong)

    async def _index(self) -> str:
        """Where a publisher missed what its engine could not replay, what is indexed is right, but not all."""
        known = (await self._fleet.router.tell())["index"]
        views = {each["id"]: each["ranks"][0]["index"] for each in await self._fleet.router.ready(self._fleet.session)}
        wrong = []
        for worker in self._fleet.workers:
            held = set((await worker.get(self._fleet.session, "/sim/cache"))["ranks"][0])
            indexed, view = set(known.get(f"{worker.name}/0/GPU", ())), views[worker.name]
            if view not in {"exact", "partial"} or indexed - held or (view == "exact" and held - indexed):
                counts = f"{len(indexed - held)} too many, {len(held - indexed)} too few of {len(held)}"
                wrong.append(f"{worker.name} ({view}): {counts}")
        self._ledger.notes["index"] = ", ".join(f"{count} {view}" for view, count in Counter(views.values()).items())
        return "; ".join(wrong)

    async def _indexes(self) -> str:
        known = await self._fleet.router.indexed(self._fleet.session)
        if len(known) < self._fleet.router.processes:
            return f"of processes {', '.join(known)} only"
        held = {}
        for worker in self._fleet.workers:
            held[worker.name] = len((await worker.get(self._fleet.session, "/sim/cache"))["ranks"][0])
        return "; ".join(
            f"process {number}: {blocks}, not {held}" for number, blocks in known.items() if blocks != held
        )

    async def _open(self) -> str:
        rest = self._rest(await self._fleet.router.tell())
        first = self._first
        if first is None or first.start != rest.start:
            self._first = rest
            return ""
        more = {kind: count for kind, count in rest.tasks.items() if count > first.tasks.get(kind, 0)}
        extra, growth = rest.descriptors - first.descriptors, rest.megabytes - first.megabytes
        self._ledger.notes["descriptors at rest"] = f"{first.descriptors} → {rest.descriptors}"
        self._ledger.notes["router's memory"] = f"{first.megabytes:.0f} → {rest.megabytes:.0f} MB"
        if extra > SPARE_DESCRIPTORS or more or growth > MOST_GROWTH:
            return f"{extra} more file descriptors, tasks {more}, {growth:.0f} MB"
        return ""

    def _rest(self, told: dict[str, Any]) -> Rest:
        actor = self._fleet.router.actor
        kept = told["clients"] + told["upstream"] + told["kept"]
        return Rest(self._fleet.router.starts, actor.descriptors - kept, told["tasks"], actor.megabytes)


def _last_traceback(log: str) -> str:
    return log[log.rindex("Traceback") :][:1500]
