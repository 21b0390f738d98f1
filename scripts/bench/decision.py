"""The routing decision while events stream in, in one process and on one event loop, as in the router.

64 workers, an index of 10 M entries, events at 50,000 blocks/s, encoded as on the event plane.
A decision is what follows tokenising: hash the prompt's 12,000 tokens, match, cost, reserve. Between two the processor
sleeps for some milliseconds, and has the next one's code and data in none of its caches; "one after the other" is the
same without that. Relayed tokens are stood for by a timer that should fire every 2 ms: how late it is, beyond what it
is without events, is what event ingest costs a stream. `python -m scripts.bench.decision [--quick]`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple, cast

import uvloop

from indexer.events import EventBatch, Removed, Stored, decode_batch, encode, pack_hashes
from indexer.hashing import chain_hashes, pack_tokens
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.types import PLAIN, SequenceHash, Tier, WorkerRank
from router.scheduling.auto import Auto
from router.scheduling.candidates import Candidates
from router.scheduling.cheapest import Cheapest
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler

from .pairs import percentile

TOKENS, BLOCK_SIZE, WORKERS = 12_000, 16, 64
BLOCKS_PER_SECOND = 50_000
BATCH = 250
"""Blocks of one event: a prefill of 4,000 tokens."""
PAUSE = 0.01
"""Seconds between two decisions, at most."""
RANKS = [WorkerRank(f"worker-{number:02}", 0) for number in range(WORKERS)]
CANDIDATES = Candidates((rank, BLOCK_SIZE) for rank in RANKS)
"""One object for all requests, as the fleet keeps it."""


class Latencies(NamedTuple):
    """Sorted, in seconds."""

    decisions: list[float]
    tokens: list[float]


class Core:
    """The parts of the router that decide, put together as it does."""

    def __init__(self, entries: int) -> None:
        self.indexer = KVIndexer()
        self.book = LoadBook()
        self._random = random.Random(4)
        self._scheduler = Scheduler(Cheapest(Auto()), self.book, self._random)
        for rank in RANKS:
            self.indexer.watch(rank)
            self._scheduler.watch(rank, BLOCK_SIZE)
        self._event_ids = {rank: count() for rank in RANKS}
        self.prompts = [pack_tokens([self._random.randrange(32_000) for _ in range(TOKENS)]) for _ in range(32)]
        """As the tokenizer gives them."""
        self._fill(entries)

    def _fill(self, entries: int) -> None:
        """Worker i holds (i + 1)/64 of each prompt that will be asked for, and everybody much else."""
        for tokens in self.prompts:
            hashes = chain_hashes(tokens, BLOCK_SIZE, 0)
            for number, rank in enumerate(RANKS):
                held = hashes[: (number + 1) * len(hashes) // WORKERS]
                self.indexer.on_batch(self._batch(rank, Stored(Tier.GPU, pack_hashes(held))))
        for turn in range((entries - self.indexer.index.entries()) // BATCH):
            rank = RANKS[turn % WORKERS]
            self.indexer.on_batch(self._batch(rank, Stored(Tier.GPU, pack_hashes(self._hashes()))))

    def _hashes(self) -> list[SequenceHash]:
        return [self._random.getrandbits(64) for _ in range(BATCH)]

    def _batch(self, rank: WorkerRank, *events: Stored | Removed) -> EventBatch:
        return EventBatch(rank.worker_id, rank.dp_rank, 1, next(self._event_ids[rank]), list(events))

    def stream(self) -> Iterator[bytes]:
        """Stores and, a second later, their removal: the index neither grows nor shrinks."""
        kept: list[tuple[WorkerRank, bytes]] = []
        for turn in count():
            rank, packed = RANKS[turn % WORKERS], pack_hashes(self._hashes())
            kept.append((rank, packed))
            yield encode(self._batch(rank, Stored(Tier.GPU, packed)))
            if turn > BLOCKS_PER_SECOND // BATCH:
                rank, packed = kept.pop(0)
                yield encode(self._batch(rank, Removed(Tier.GPU, packed)))

    def decide(self) -> None:
        tokens = self._random.choice(self.prompts)
        prompt = hash_prompt(cast("Sequence[int]", tokens), {BLOCK_SIZE}, PLAIN)
        matches = self.indexer.find_matches(prompt)
        now = time.monotonic()
        decision = self._scheduler.select(CANDIDATES, TOKENS, matches, now)
        self._scheduler.reserve(decision, now).release(now)


async def measure(core: Core, seconds: float, with_events: bool, pause: float = PAUSE) -> Latencies:
    found = Latencies([], [])
    stream = core.stream()
    batches = [next(stream) for _ in range(int(seconds * BLOCKS_PER_SECOND / BATCH) if with_events else 0)]
    end = time.perf_counter() + seconds
    await asyncio.gather(_ingest(core, batches), _decide(core, found.decisions, end, pause), _tick(found.tokens, end))
    return Latencies(sorted(found.decisions), sorted(found.tokens))


async def _ingest(core: Core, batches: list[bytes]) -> None:
    """One by one, as from one subscription for each worker."""
    began = time.perf_counter()
    for number, batch in enumerate(batches):
        await asyncio.sleep(max(0.0, began + number * BATCH / BLOCKS_PER_SECOND - time.perf_counter()))
        core.indexer.on_batch(decode_batch(batch))


async def _decide(core: Core, found: list[float], end: float, pause: float) -> None:
    draw = random.Random(5)
    while time.perf_counter() < end:
        await asyncio.sleep(draw.uniform(0.0, pause))
        began = time.perf_counter()
        core.decide()
        found.append(time.perf_counter() - began)


async def _tick(found: list[float], end: float) -> None:
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(0.002)
        found.append(max(0.0, time.perf_counter() - now - 0.002))


def run(quick: bool) -> dict[str, float]:
    """Milliseconds."""
    entries, seconds = (1_000_000, 4.0) if quick else (10_000_000, 30.0)
    core = Core(entries)
    gc.collect()
    gc.freeze()  # as a long-lived process: what is there by now is not looked at again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        still = runner.run(measure(core, seconds, with_events=False))
        busy = runner.run(measure(core, seconds, with_events=True))
        awake = runner.run(measure(core, seconds / 3, with_events=True, pause=0.0))
    return {
        "entries": core.indexer.index.entries(),
        "decision p50": percentile(busy.decisions, 0.5) * 1e3,
        "decision p99": percentile(busy.decisions, 0.99) * 1e3,
        "decision p99, no events": percentile(still.decisions, 0.99) * 1e3,
        "decision p50, one after the other": percentile(awake.decisions, 0.5) * 1e3,
        "decision p99, one after the other": percentile(awake.decisions, 0.99) * 1e3,
        "token delay p99.9": percentile(busy.tokens, 0.999) * 1e3,
        "token delay p99.9, no events": percentile(still.tokens, 0.999) * 1e3,
    }


if __name__ == "__main__":
    for name, value in run("--quick" in sys.argv).items():
        print(f"{name}: {value:,.3f}")
