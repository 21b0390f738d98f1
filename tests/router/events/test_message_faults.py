"""Messages that are lost, repeated, reordered or minutes late, in virtual time: in the end the index is right."""

from __future__ import annotations

import ast
import asyncio
import heapq
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from engines.events import BlockRemoved, BlockStored, EngineBatch, EngineEvent
from engines.rank_load import RankLoad
from indexer.cursor import SILENCE, View
from indexer.events import EventBatch
from indexer.types import PLAIN, EngineHash, Tier
from publishers.local_plane import LocalPlane
from publishers.rank import Epochs, RankPublisher
from tests.router.events.following import BLOCK, RANK, Engine, Follower, following

MINUTES = 300.0
"""Seconds that a message may be late, at most."""
ROOT = Path(__file__).resolve().parents[3]


class FaultyPlane(LocalPlane):
    """Delivers what it likes, when it likes; replays are answered at once, or not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.now = 0.0
        self.faulty = True
        self._late: list[tuple[float, int, str, bytes]] = []
        self._order = count()

    def publish(self, subject: str, payload: bytes) -> None:
        if not self.faulty:
            super().publish(subject, payload)
            return
        fate = self.draw.random()
        for _ in range(0 if fate < 0.1 else 2 if fate < 0.2 else 1):
            late = MINUTES * self.draw.random() if self.draw.random() < 0.1 else 2 * self.draw.random()
            heapq.heappush(self._late, (self.now + late, next(self._order), subject, payload))

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self._late and self._late[0][0] <= self.now:
            _, _, subject, payload = heapq.heappop(self._late)
            super().publish(subject, payload)


class Publisher:
    """Of one rank; what it is told goes out with `send`."""

    def __init__(self, plane: FaultyPlane, engine: Engine, wall: int = 10**18) -> None:
        self._rank = RankPublisher(RANK, plane, "default", Epochs(lambda: wall))
        self._made: list[EventBatch] = []
        engine.attach(self)

    def stored(self, block_hashes: Sequence[EngineHash], parent: EngineHash | None, tokens: Sequence[int], /) -> None:
        self._apply(BlockStored(list(block_hashes), parent, list(tokens), BLOCK, Tier.GPU, PLAIN))

    def removed(self, block_hashes: Sequence[EngineHash], /) -> None:
        self._apply(BlockRemoved(list(block_hashes), Tier.GPU))

    def _apply(self, event: EngineEvent) -> None:
        self._made += self._rank.relay.apply(EngineBatch(0.0, None, [event], {}))

    async def start(self) -> None:
        await self._rank.start()

    async def close(self) -> None:
        await self._rank.close()

    async def send(self) -> None:
        """All that was told since, and a report."""
        for batch in self._made:
            self._rank.publish(batch)
        self._made.clear()
        self._rank.report(RankLoad())


class World:
    """An engine, its publisher and a router, a second at a time."""

    def __init__(self, plane: FaultyPlane, follower: Follower) -> None:
        self.plane, self.follower, self.engine = plane, follower, Engine()
        self.publisher = Publisher(plane, self.engine)
        self.views = Counter[View]()
        self._numbers = count(1)

    async def second(self) -> None:
        draw, engine = self.plane.draw, self.engine
        for _ in range(draw.randrange(4)):
            engine.store(next(self._numbers))
        while len(engine.numbers) > 40:
            engine.evict(draw.choice(engine.numbers))
        await self.rest()

    async def rest(self) -> None:
        await self.publisher.send()
        await self.plane.pass_time(1.0)
        self.follower.ingest.tick()
        self.views[self.follower.view] += 1
        for _ in range(20):  # replays are tasks
            await asyncio.sleep(0)
        assert self.follower.view is not View.EXACT or self.plane.faulty or self.right

    async def restart_publisher(self, wall: int) -> None:
        await self.publisher.close()
        self.publisher = Publisher(self.plane, self.engine, wall)
        await self.publisher.start()

    @property
    def right(self) -> bool:
        return self.follower.held == self.engine.held

    async def settles(self) -> None:
        """Nothing goes wrong any more, but what is late still comes."""
        self.plane.faulty = False
        for _ in range(4 * SILENCE):
            await self.rest()
        assert self.right
        for _ in range(int(MINUTES)):  # late news of what is long over changes nothing
            await self.rest()
            assert self.right
        assert self.follower.view is View.EXACT


@asynccontextmanager
async def world(seed: int) -> AsyncIterator[World]:
    plane = FaultyPlane(seed)
    async with following(plane) as follower:
        found = World(plane, follower)
        await found.publisher.start()
        yield found
        await found.publisher.close()


@pytest.mark.parametrize("seed", range(6))
async def test_what_goes_wrong_with_messages_is_put_right(seed: int) -> None:
    async with world(seed) as found:
        for _ in range(200):
            await found.second()
        assert found.views[View.RECOVERING] > 0
        await found.settles()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("jump", [3600, -3600], ids=["forward", "back"])
async def test_the_publisher_starts_anew_and_its_wall_clock_has_jumped(seed: int, jump: int) -> None:
    async with world(seed) as found:
        wall = 10**18
        for restart in range(3):
            for _ in range(40):
                await found.second()
            wall += (jump + restart) * 10**9
            await found.restart_publisher(wall)
        for _ in range(5):
            await found.second()
        await found.settles()


async def test_a_router_whose_replays_nobody_answers_never_claims_to_know() -> None:
    async with world(1) as found:
        await found.publisher.close()
        for _ in range(100):
            await found.second()
        assert not found.right
        assert found.follower.view is View.RECOVERING
        await found.publisher.start()
        await found.settles()


_MAY = {("publishers", "time_ns"), ("router/app.py", "time"), ("router/tracing/telemetry.py", "time_ns")}
"""Epochs, which only have to grow; when the models listed at /v1/models are said to have been made; and when spans
began, which are compared with other machines'."""


def test_no_wall_clock_matters() -> None:
    for package in ("indexer", "engines", "publishers", "router"):
        for path in (ROOT / package).rglob("*.py"):
            place = path.relative_to(ROOT).as_posix()
            if not place.startswith("engines/sim/"):
                named = {(part, name) for part in (package, place) for name in wall_clocks(path)}
                assert {name for _, name in named - _MAY} <= {name for _, name in named & _MAY}, place


def wall_clocks(path: Path) -> set[str]:
    """Those that a module reads."""
    text = path.read_text(encoding="utf-8")
    return {
        node.attr
        for node in ast.walk(ast.parse(text if "time.time" in text else ""))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns")}
    }
