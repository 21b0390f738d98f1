"""One simulated worker: its ranks, what they publish, and the requests it was given; HTTP is in `server`."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence

import zmq

from engines.endpoints import url_host
from engines.sim.cache import CacheEvent
from engines.sim.clock import SimClock
from engines.sim.connectors import CONNECTORS
from engines.sim.connectors.base import Fleet
from engines.sim.event_publisher import EventPublisher, bind_publishers
from engines.sim.faults import Faults
from engines.sim.flavour import Flavour, WorkerFacts
from engines.sim.generation import Refused
from engines.sim.place import Place
from engines.sim.rank import Rank
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler
from engines.sim.settings import EVENT_PORT_OFFSET, SimSettings
from engines.sim.sglang_flavour import SglangFlavour
from engines.sim.tokens import Answers, Tokenizer
from engines.sim.vllm_flavour import VllmFlavour
from indexer.hashing import pack_tokens

FLAVOURS: dict[str, type[Flavour]] = {"vllm": VllmFlavour, "sglang": SglangFlavour}
SIDE_PORT = 5600
"""vLLM's default side channel, VLLM_NIXL_SIDE_CHANNEL_PORT."""


class Worker:
    """Binds its event sockets when made (zmq.ZMQError when a port is taken); `close` gives everything back."""

    def __init__(
        self,
        index: int,
        settings: SimSettings,
        tokenizer: Tokenizer,
        answers: Answers,
        clock: SimClock,
        context: zmq.Context[zmq.Socket[bytes]],
        fleet: Fleet,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.answers = answers
        self.answer_ids = pack_tokens(answers.tokens)
        self.faults = Faults()
        self.in_flight = 0
        self._own_slowdown = settings.slow.get(index, 1.0)
        self._ids = random.Random(f"{settings.seed}/{index}")  # noqa: S311 - names, not secrets
        self.place = self._place(index)
        fleet.places.append(self.place)
        self.fleet = fleet
        self.connector = CONNECTORS[settings.connector](self.place, fleet, settings)
        flavour = FLAVOURS[settings.flavour]
        schedulers = [self._scheduler(flavour.decode_blocks_at_finish) for _ in range(settings.dp_size)]
        topic = f"kv@w{index}@{settings.model}"
        self._publishers, event_port, replay_port = self._bind(index, topic, context)
        created = int(time.time())
        fleet.schedulers += schedulers
        self.flavour = flavour(WorkerFacts(settings, topic, event_port, replay_port, created, schedulers, self.place))
        loop = asyncio.get_running_loop()
        self.ranks = [
            Rank(scheduler, loop, clock, self._publish_for(number), self._fetch_for(number))
            for number, scheduler in enumerate(schedulers)
        ]
        if self.flavour.clears_at_start:
            self.reset_cache()

    def rank(self, asked: int | None) -> Rank:
        """The rank asked for, else the least loaded, waiting requests counting four times as in vLLM's own balancer.

        Raises Refused when there is no such rank.
        """
        if asked is None:
            return min(self.ranks, key=_burden)
        if 0 <= asked < len(self.ranks):
            return self.ranks[asked]
        raise Refused(400, f"data parallel rank {asked} is out of range [0, {len(self.ranks)}).", "data_parallel_rank")

    def new_request_id(self) -> str:
        return f"{self._ids.getrandbits(64):016x}"

    def reset_cache(self) -> bool:
        """Clear every rank's cache; False when one has blocks in use."""
        results = [rank.reset_cache(self.flavour.clears_at_once) for rank in self.ranks]  # not stopping at the first
        return all(results)

    def slow_down(self, factor: float) -> None:
        """Every step takes `factor` times what is usual for this worker."""
        for rank in self.ranks:
            rank.scheduler.slowdown = self._own_slowdown * factor

    async def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for publisher in self._publishers:
            await publisher.close()

    def _place(self, index: int) -> Place:
        settings = self.settings
        prefix = uuid.uuid4().hex  # a restarted engine has another
        return Place(
            name=f"worker {index}",
            role=settings.roles.get(index, "both"),
            host=settings.host,
            engine_ids=[f"{prefix}_dp{rank}" for rank in range(settings.dp_size)],
            side_port=SIDE_PORT + index * settings.dp_size,
            faults=self.faults,
        )

    def _fetch_for(self, rank: int) -> Callable[[Request, int], None]:
        return lambda request, missing: self.connector.fetch(self.ranks[rank], request, missing)

    def _scheduler(self, decode_blocks_at_finish: bool) -> Scheduler:
        settings = self.settings
        scheduler = Scheduler(
            cache_blocks=settings.cache_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            timing=settings.timing,
            answers=self.answers.tokens,
            decode_blocks_at_finish=decode_blocks_at_finish,
            max_loras=settings.max_loras,
        )
        scheduler.slowdown = self._own_slowdown
        return scheduler

    def _bind(
        self, index: int, topic: str, context: zmq.Context[zmq.Socket[bytes]]
    ) -> tuple[Sequence[EventPublisher], int, int]:
        settings = self.settings
        if not settings.kv_events:
            return [], 0, 0
        # Two runs of ports a worker: events of every rank, then replay of every rank.
        port = settings.port and settings.port + EVENT_PORT_OFFSET + index * 2 * settings.dp_size
        return bind_publishers(context, url_host(settings.host), port, settings.dp_size, topic)

    def _publish_for(self, rank: int) -> Callable[[list[CacheEvent]], None]:
        if not self._publishers:
            return lambda _events: None
        publisher = self._publishers[rank]
        return lambda events: publisher.publish(self.flavour.encode_events(time.time(), events, rank))


def _burden(rank: Rank) -> int:
    scheduler = rank.scheduler
    return 4 * (len(scheduler.waiting) + len(scheduler.loading)) + len(scheduler.running)
