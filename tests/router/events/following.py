"""A router's side of the event plane, and an engine's: with what the index should then be."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Protocol

from indexer.cursor import SILENCE, View
from indexer.hashing import chain_hashes, pack_tokens
from indexer.kv_indexer import KVIndexer
from indexer.types import EngineHash, Tier, WorkerRank
from publishers.library import KVPublisher
from publishers.plane import EventPlane
from router.events.ingest import Ingest
from router.metrics.registry import Metrics
from router.scheduling.load import LoadBook
from tests.fakes.waiting import until

BLOCK = 4
RANK = WorkerRank("w", 0)
REPORTS = 0.02
"""Seconds between two load reports: looks, which are a second apart, are made by hand."""


class Told(Protocol):
    """A publisher."""

    def stored(
        self, block_hashes: Sequence[EngineHash], parent: EngineHash | None, tokens: Sequence[int], /
    ) -> None: ...
    def removed(self, block_hashes: Sequence[EngineHash], /) -> None: ...


class Engine:
    """One rank's cache: prompts of a few blocks, stored and evicted whole."""

    def __init__(self) -> None:
        self.publisher: Told | None = None
        self._prompts: dict[int, list[int]] = {}

    @property
    def numbers(self) -> list[int]:
        return list(self._prompts)

    @property
    def held(self) -> set[int]:
        """By the names that the router has for blocks."""
        return set().union(*(_blocks(tuple(tokens)) for tokens in self._prompts.values()))

    def attach(self, publisher: Told) -> None:
        """Another one, which is told all that there is."""
        self.publisher = publisher
        for number in self._prompts:
            self._tell(number)

    def store(self, *numbers: int, blocks: int = 3) -> None:
        for number in numbers:
            self._prompts[number] = [number * 1000 + token for token in range(blocks * BLOCK)]
            self._tell(number)

    def evict(self, number: int) -> None:
        tokens = self._prompts.pop(number)
        if self.publisher:
            self.publisher.removed(_names(number, tokens))

    def _tell(self, number: int) -> None:
        tokens = self._prompts[number]
        if self.publisher:
            self.publisher.stored(_names(number, tokens), None, tokens)


def _names(number: int, tokens: list[int]) -> list[EngineHash]:
    return [number * 1000 + block for block in range(len(tokens) // BLOCK)]


@cache
def _blocks(tokens: tuple[int, ...]) -> frozenset[int]:
    return frozenset(chain_hashes(pack_tokens(tokens), BLOCK, 0).tolist())


class Follower:
    """What a router keeps of the event plane."""

    def __init__(self, plane: EventPlane) -> None:
        self.plane, self.indexer, self.metrics, self.book = plane, KVIndexer(), Metrics(), LoadBook()
        self.ingest = Ingest(plane, "default", self.indexer, self.book, self.metrics, time.monotonic)
        self.indexer.watch(RANK)
        self.book.watch(RANK, BLOCK)

    @property
    def held(self) -> set[int]:
        return self.indexer.index.dump().get((RANK, Tier.GPU), set())

    @property
    def hears(self) -> bool:
        """Whether there was a report."""
        return self.book.get_metrics(time.monotonic())[RANK].age is not None

    @property
    def view(self) -> View:
        return self.indexer.view(RANK)

    def seconds_pass(self, seconds: int = SILENCE + 1) -> None:
        """In which nothing is heard."""
        for _ in range(seconds):
            self.ingest.tick()

    async def agrees(self, engine: Engine) -> None:
        """In the end the view is exact, and the index what the engine holds."""
        await until(lambda: self.view is View.EXACT and self.held == engine.held, timeout=20)


@asynccontextmanager
async def following(plane: EventPlane) -> AsyncIterator[Follower]:
    """`plane` must not be started yet."""
    follower = Follower(plane)
    await plane.start()
    await follower.ingest.start()
    try:
        yield follower
    finally:
        await follower.ingest.close()
        await plane.close()


@asynccontextmanager
async def publishing(
    plane: EventPlane, engine: Engine, now_ns: Callable[[], int] = time.time_ns
) -> AsyncIterator[KVPublisher]:
    await plane.start()
    publisher = KVPublisher(plane, *RANK, BLOCK, report_interval=REPORTS, now_ns=now_ns)
    await publisher.start()
    engine.attach(publisher)
    try:
        yield publisher
    finally:
        engine.publisher = None
        await publisher.close()
        await plane.close()


async def fresh(plane: EventPlane, engine: Engine) -> Follower:
    """A router that comes only now, and knows what it was told of everything at once."""
    async with following(plane) as follower:
        await follower.agrees(engine)
        return follower
