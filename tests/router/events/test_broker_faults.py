"""The broker goes away in every way that it can: what the router says of its view is true meanwhile, and afterwards it
knows exactly what the engine holds."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client

import publishers.nats_plane
from indexer.cursor import View
from publishers.embedded_nats import NatsServer
from publishers.nats_plane import NatsPlane
from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.waiting import until
from tests.nats_fixture import nats_server
from tests.router.events.following import Engine, Follower, following, fresh, publishing

pytestmark = pytest.mark.nats
__all__ = ["nats_server"]


class Both(NamedTuple):
    """The ways of both sides to the broker, each through a proxy of its own."""

    server: NatsServer
    router: FaultyProxy
    engine: FaultyProxy

    def plane(self, side: FaultyProxy) -> NatsPlane:
        return NatsPlane([f"nats://127.0.0.1:{side.port}"], reply_timeout=0.5)


@asynccontextmanager
async def proxied(server: NatsServer) -> AsyncIterator[Both]:
    router, engine = (FaultyProxy(server.host, server.port, seed=seed) for seed in (1, 2))
    async with router, engine:
        yield Both(server, router, engine)


@asynccontextmanager
async def up(server: NatsServer) -> AsyncIterator[tuple[Both, Engine, Follower]]:
    """All is well, and something is known."""
    engine = Engine()
    async with (
        proxied(server) as both,
        publishing(both.plane(both.engine), engine),
        following(both.plane(both.router)) as follower,
    ):
        engine.store(1, 2, 3)
        await follower.agrees(engine)
        yield both, engine, follower
        await follower.agrees(engine)
        newcomer = await fresh(NatsPlane([server.url]), engine)
        assert newcomer.indexer.index.dump() == follower.indexer.index.dump()


def change(engine: Engine) -> None:
    """So that whoever missed it is wrong in both ways."""
    engine.evict(1)
    engine.store(4, 5)
    engine.evict(5)


async def test_it_is_away_at_the_start(nats_server: NatsServer) -> None:
    engine = Engine()
    async with proxied(nats_server) as both:
        for proxy in both[1:]:
            proxy.refuse(True)
        async with (
            publishing(both.plane(both.engine), engine),
            following(both.plane(both.router)) as follower,
        ):
            engine.store(1, 2)
            follower.seconds_pass()
            assert follower.view is View.BLIND
            for proxy in both[1:]:
                proxy.refuse(False)
            await follower.agrees(engine)


async def test_it_is_killed_and_comes_back(nats_server: NatsServer) -> None:
    async with up(nats_server) as (_, engine, follower):
        await nats_server.stop()
        await until(lambda: not follower.plane.connected)
        follower.seconds_pass(1)
        assert follower.view is View.RECOVERING
        change(engine)
        await nats_server.start()
        await follower.agrees(engine)


@pytest.mark.parametrize("side", ["router", "engine"])
async def test_one_side_loses_its_connection(nats_server: NatsServer, side: str) -> None:
    async with up(nats_server) as (both, engine, follower):
        proxy: FaultyProxy = getattr(both, side)
        proxy.refuse(True)
        proxy.cut()
        await until(lambda: not proxy.connections)
        change(engine)
        follower.seconds_pass()
        assert follower.view is View.RECOVERING
        proxy.refuse(False)


@pytest.mark.parametrize("direction", ["up", "down", "both"])
@pytest.mark.parametrize("side", ["router", "engine"])
async def test_one_side_is_partitioned_for_longer_than_a_ping_may_take(
    nats_server: NatsServer, side: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.nats_plane, "PING_INTERVAL", 0.05)
    async with up(nats_server) as (both, engine, follower):
        proxy: FaultyProxy = getattr(both, side)
        connections = proxy.accepted
        proxy.stall(True, direction)  # type: ignore[arg-type] # one of its three
        change(engine)
        await until(lambda: proxy.accepted > connections)  # it was noticed, and tried again
        follower.seconds_pass()
        assert follower.view is View.RECOVERING
        proxy.stall(False)


async def test_a_partition_that_nobody_notices_yet_shows_in_the_view(nats_server: NatsServer) -> None:
    async with up(nats_server) as (both, engine, follower):
        both.router.stall(True, "down")
        change(engine)
        follower.seconds_pass()
        assert follower.plane.connected
        assert follower.view is View.RECOVERING
        both.router.stall(False)


async def test_it_is_slow(nats_server: NatsServer) -> None:
    async with up(nats_server) as (both, engine, follower):
        both.router.throttle(20_000)
        for number in range(10, 200):
            engine.store(number)
        change(engine)
        assert follower.held != engine.held
        both.router.throttle(None)


async def test_messages_are_late(nats_server: NatsServer) -> None:
    async with up(nats_server) as (both, engine, follower):
        both.router.delay(0.2, jitter=0.2)
        both.engine.delay(0.1, jitter=0.1)
        change(engine)
        await follower.agrees(engine)


async def test_connections_break_again_and_again(nats_server: NatsServer) -> None:
    async with up(nats_server) as (both, engine, _):
        for proxy in (both.router, both.engine):
            proxy.drop(0.05)
        for number in range(10, 60):
            engine.store(number)
            if number % 3 == 0:
                engine.evict(number)
        await until(lambda: both.router.accepted + both.engine.accepted >= 6)
        for proxy in (both.router, both.engine):
            proxy.drop(0)


async def test_a_consumer_that_is_too_slow_loses_messages_and_asks_for_them(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = Client.subscribe

    async def narrow(client: Client, subject: str, **kinds: Any) -> Any:
        if ".events." in subject:
            kinds["pending_msgs_limit"] = 4
        return await subscribe(client, subject, **kinds)

    async with up(nats_server) as (both, engine, _):
        monkeypatch.setattr(Client, "subscribe", narrow)
        async with following(both.plane(both.router)) as follower:
            await follower.agrees(engine)
            for number in range(10, 300):
                engine.store(number)
            await follower.agrees(engine)
            assert follower.metrics.registry.get_sample_value("router_replays_total", {"outcome": "answered"})


async def test_the_publisher_starts_anew(nats_server: NatsServer) -> None:
    engine = Engine()
    async with proxied(nats_server) as both, following(both.plane(both.router)) as follower:
        async with publishing(both.plane(both.engine), engine):
            engine.store(1, 2, 3)
            await follower.agrees(engine)
        engine.evict(1)
        engine.store(7)
        follower.seconds_pass()
        assert follower.view is View.RECOVERING
        async with publishing(both.plane(both.engine), engine):
            await follower.agrees(engine)


async def test_the_publisher_starts_anew_with_its_wall_clock_set_back(nats_server: NatsServer) -> None:
    engine = Engine()
    async with proxied(nats_server) as both, following(both.plane(both.router)) as follower:
        async with publishing(both.plane(both.engine), engine):
            engine.store(1, 2, 3)
            await follower.agrees(engine)
        engine.evict(1)
        async with publishing(both.plane(both.engine), engine, lambda: time.time_ns() - 3600 * 10**9):
            engine.store(7)
            follower.seconds_pass()
            assert follower.view is View.RECOVERING
            await follower.agrees(engine)
            engine.store(8)
            await follower.agrees(engine)


async def test_a_prompt_larger_than_it_takes_in_a_message_arrives(nats_server: NatsServer) -> None:
    engine, plane = Engine(), NatsPlane([nats_server.url])
    async with publishing(plane, engine), following(NatsPlane([nats_server.url])) as follower:
        engine.store(1, blocks=140_000)
        await follower.agrees(engine)
        assert plane.dropped == 0
