"""Engines, publishers, broker and router in one piece: the router's own pages tell the truth of what it knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from engines.description import EngineDescription
from engines.sim.fleet import SimFleet
from indexer.cursor import View
from indexer.types import Tier, WorkerRank
from publishers.embedded_nats import NatsServer
from publishers.nats_plane import NatsPlane
from publishers.publisher import EnginePublisher
from tests.engines.sim.fleets import BLOCK, Client, settings
from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import CLEARED, FakeEngine, ours, removed, stored
from tests.nats_fixture import nats_server
from tests.router.events.following import RANK, REPORTS, Engine, Follower, following, publishing
from tests.router.proxy.running import RunningRouter, running, session

pytestmark = pytest.mark.nats
__all__ = ["nats_server"]

NOWHERE = "http://127.0.0.1:9"


@asynccontextmanager
async def published(server: NatsServer, engine: FakeEngine) -> AsyncIterator[Follower]:
    """What a router makes of what a publisher makes of `engine`."""
    plane = NatsPlane([server.url])
    await plane.start()
    publisher = EnginePublisher(
        worker_id=RANK.worker_id,
        url=NOWHERE,
        plane=plane,
        description=EngineDescription("vllm", event_sources=(engine.source,)),
        load_interval=REPORTS,
    )
    await publisher.start()
    async with following(NatsPlane([server.url])) as follower:
        yield follower
    await publisher.close()
    await plane.close()


async def test_an_engine_starts_anew_at_its_address(nats_server: NatsServer) -> None:
    async with FakeEngine() as engine, published(nats_server, engine) as follower:
        await engine.subscribed()
        await engine.publish(stored(1, 2), stored(3, parent=2))
        await until(lambda: follower.held == ours(1, 2, 3) and follower.view is View.EXACT)
        await engine.restart(stored(7), stored(8, parent=7), removed(8))
        await until(lambda: follower.held == ours(7) and follower.view is View.EXACT)
        await engine.subscribed()
        await engine.publish(CLEARED, stored(9))
        await until(lambda: follower.held == ours(9))


async def test_an_engine_that_its_publisher_does_not_hear_is_not_known_exactly(nats_server: NatsServer) -> None:
    async with FakeEngine() as engine:
        await engine._close()
        async with published(nats_server, engine) as follower:
            await until(lambda: follower.hears)
            assert follower.view is View.BLIND
            engine._open()
            await until(lambda: follower.view is View.EXACT)
            await engine.subscribed()
            await engine.publish(stored(1))
            await until(lambda: follower.held == ours(1))
            await engine._close()
            await until(lambda: follower.view is View.PARTIAL)
            engine._open()
            await until(lambda: follower.view is View.EXACT)
            assert follower.held == ours(1)


async def of_rank(router: RunningRouter) -> dict[str, Any]:
    """What /ready tells of the one there is."""
    async with session(router) as client, client.get("/ready") as answer:
        worker = (await answer.json(loads=json.loads))["workers"][0]
        found: dict[str, Any] = worker["ranks"][0]
        return found


async def until_told(router: RunningRouter, view: str) -> None:
    async with asyncio.timeout(30):
        while (await of_rank(router))["index"] != view:  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.01)
    named = {"worker": RANK.worker_id, "dp_rank": "0"}
    views = {each.value: router.total("router_index_view", view=each.value, **named) for each in View}
    assert views == {each.value: float(each.value == view) for each in View}


async def test_the_routers_pages_tell_how_far_it_knows_a_rank(nats_server: NatsServer) -> None:
    engine = Engine()
    async with FaultyProxy(nats_server.host, nats_server.port) as proxy, ScriptedWorker(RANK.worker_id) as worker:
        plane = f"nats://127.0.0.1:{proxy.port}"
        async with running(worker, router_mode="kv", event_plane=plane) as router:
            await until_told(router, "blind")
            async with publishing(NatsPlane([nats_server.url]), engine):
                engine.store(1, 2, blocks=3)
                await until_told(router, "exact")
                await until(lambda: router.total("router_index_blocks", tier="gpu") == 6)
                proxy.refuse(True)
                proxy.cut()
                engine.evict(1)
                await until_told(router, "recovering")
                assert router.total("router_event_plane_connected") == 0
                assert (await of_rank(router))["blocks"]["gpu"] == 6
                proxy.refuse(False)
                await until_told(router, "exact")
                assert router.total("router_event_plane_connected") == 1
                assert (await of_rank(router))["blocks"]["gpu"] == 3


class Fleet:
    """Simulated engines, a publisher beside each, and requests to them."""

    def __init__(self, fleet: SimFleet, http: aiohttp.ClientSession) -> None:
        self.clients = [Client(http, fleet, number) for number in range(len(fleet.workers))]
        self.ranks = [WorkerRank(f"worker-{number}", 0) for number in range(len(self.clients))]

    async def serve(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            for client in self.clients:
                await client.complete([number] * BLOCK * 8)

    @property
    def held(self) -> dict[tuple[WorkerRank, Tier], set[int]]:
        caches = [set(client.scheduler.cache.hashes) for client in self.clients]
        return {(rank, Tier.GPU): cache for rank, cache in zip(self.ranks, caches, strict=True)}


@asynccontextmanager
async def simulated(server: NatsServer, flavour: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as opened:
        sim = await opened.enter_async_context(SimFleet(settings(workers=2, flavour=flavour)))
        found = Fleet(sim, await opened.enter_async_context(aiohttp.ClientSession()))
        plane = NatsPlane([server.url])
        await plane.start()
        opened.push_async_callback(plane.close)
        for client, rank in zip(found.clients, found.ranks, strict=True):
            publisher = EnginePublisher(worker_id=rank.worker_id, url=client.url, plane=plane, load_interval=REPORTS)
            await publisher.start()
            opened.push_async_callback(publisher.close)
        yield found


@asynccontextmanager
async def following_all(server: NatsServer, fleet: Fleet) -> AsyncIterator[Follower]:
    async with following(NatsPlane([server.url])) as follower:
        for rank in fleet.ranks:
            follower.indexer.watch(rank)
        yield follower


async def settles(follower: Follower, fleet: Fleet) -> None:
    """The index is what the engines hold, and known to be."""
    await until(lambda: gpu_blocks(follower) == fleet.held, timeout=20)
    await until(lambda: all(follower.indexer.view(rank) is View.EXACT for rank in fleet.ranks))


def gpu_blocks(follower: Follower) -> dict[tuple[WorkerRank, Tier], set[int]]:
    return {key: blocks for key, blocks in follower.indexer.index.dump().items() if key[1] is Tier.GPU}


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
async def test_after_the_broker_was_away_the_index_is_that_of_a_router_that_comes_only_then(
    nats_server: NatsServer, flavour: str
) -> None:
    async with simulated(nats_server, flavour) as fleet, following_all(nats_server, fleet) as follower:
        await fleet.serve(1, 15)
        await settles(follower, fleet)
        before = gpu_blocks(follower)
        await nats_server.stop()
        await fleet.serve(16, 30)  # more than fits: what is known is evicted meanwhile
        assert gpu_blocks(follower) == before
        assert not any(before[key] & blocks for key, blocks in fleet.held.items())
        await nats_server.start()
        await settles(follower, fleet)
        async with following_all(nats_server, fleet) as newcomer:
            await settles(newcomer, fleet)
            assert newcomer.indexer.index.dump() == follower.indexer.index.dump()
