"""For engines of one's own: publish a cache's events and a worker's load without speaking any engine's protocol.

    plane = make_plane("nats://nats:4222")
    await plane.start()
    publisher = KVPublisher(plane, "worker-1", dp_rank=0, block_size=16)
    await publisher.start()
    metrics = WorkerMetricsPublisher(publisher)

    publisher.stored([hash_0, hash_1], parent_block_hash=None, token_ids=prompt[:32])
    publisher.removed([hash_1])
    metrics.publish(request_active_slots=3, num_requests_waiting=0)

    await publisher.close()

Block hashes are the engine's own, opaque, and only have to be unique among the blocks held; token ids stay here.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from engines.answers import share, whole
from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBatch, EngineEvent
from engines.rank_load import RankLoad
from indexer.types import EngineHash, Namespace, Tier, WorkerRank
from publishers.counts import RelayCounts
from publishers.ending import end_tasks
from publishers.plane import NAMESPACE_TAKES, WORKER_ID_TAKES, EventPlane, is_namespace, is_worker_id
from publishers.rank import Epochs, RankPublisher

REPORT_INTERVAL = 1.0


class KVPublisher:
    """One (worker, dp_rank) and its cache of blocks of `block_size` tokens.

    `stored`, `removed` and `cleared` never block and never raise for what is wrong with one event: it is counted in
    `counts`. All methods belong to the event loop that `start` ran in. The load report with the last known figures is
    repeated every `report_interval` seconds, so that receivers notice what they missed.
    """

    def __init__(
        self,
        plane: EventPlane,
        worker_id: str,
        dp_rank: int,
        block_size: int,
        *,
        namespace: str = "default",
        report_interval: float = REPORT_INTERVAL,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """ValueError for a worker id, a rank, a block size or a namespace that is none."""
        if not is_worker_id(worker_id):
            raise ValueError(f"a worker id takes {WORKER_ID_TAKES}, not {worker_id!r}")
        if dp_rank < 0:
            raise ValueError(f"ranks are counted from 0: {dp_rank} is none")
        if block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size}")
        if not is_namespace(namespace):
            raise ValueError(f"a namespace takes {NAMESPACE_TAKES}, not {namespace!r}")
        self._block_size = block_size
        self._report_interval = report_interval
        self._rank = RankPublisher(WorkerRank(worker_id, operator.index(dp_rank)), plane, namespace, Epochs(now_ns))
        self._reports: asyncio.Task[None] | None = None
        self._load = RankLoad()
        self._load_changed = asyncio.Event()

    @property
    def counts(self) -> RelayCounts:
        return self._rank.relay.counts

    async def start(self) -> None:
        await self._rank.start()
        self._reports = asyncio.create_task(self._send_reports())

    async def close(self) -> None:
        if self._reports is not None:
            await end_tasks([self._reports])
            self._reports = None
        await self._rank.close()

    def stored(
        self,
        block_hashes: Sequence[EngineHash],
        parent_block_hash: EngineHash | None,
        token_ids: Sequence[int],
        tier: Tier = Tier.GPU,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """The cache now holds these contiguous full blocks, which follow the parent (None: from the prompt's start).

        `lora_name` and `cache_salt` matter where there is no parent; the others inherit.
        """
        with self._counting():
            hashes, (parent,) = _plain(block_hashes), _plain([parent_block_hash])
            namespace = Namespace(lora_name, cache_salt)
            self._apply(BlockStored(hashes, parent, list(token_ids), self._block_size, Tier(tier), namespace))

    def removed(self, block_hashes: Sequence[EngineHash], tier: Tier = Tier.GPU) -> None:
        """One copy of each of these blocks is gone."""
        with self._counting():
            self._apply(BlockRemoved(_plain(block_hashes), Tier(tier)))

    def cleared(self) -> None:
        """Nothing is held any more."""
        self._apply(AllBlocksCleared())

    def report(self, load: RankLoad) -> None:
        """Sends a load report soon, and these figures with every later one until the next call.

        A figure that is none is left out and counted: receivers would refuse the report with all that it says.
        """
        given = msgspec.structs.asdict(load)
        figures = {name: _figure(name, value) for name, value in given.items()}
        self.counts.malformed += sum(value is not None and figures[name] is None for name, value in given.items())
        self._load = RankLoad(**figures)
        self._load_changed.set()

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """What is of a wrong type is wrong with one event, too."""
        try:
            yield
        except (TypeError, ValueError, AttributeError):
            self._rank.relay.malformed()

    def _apply(self, event: EngineEvent) -> None:
        for batch in self._rank.relay.apply(EngineBatch(0.0, None, [event], {})):
            self._rank.publish(batch)

    async def _send_reports(self) -> None:
        while True:
            self._load_changed.clear()
            self._rank.report(self._load)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._report_interval):
                    await self._load_changed.wait()


def _plain(hashes: Iterable[Any]) -> list[Any]:
    """Numbers of numpy's are the numbers that they stand for."""
    return [int(one) if isinstance(one, np.integer) else one for one in hashes]


_SHARES: Final = frozenset({"gpu_cache_usage_perc", "gpu_prefix_cache_hit_rate"})


def _figure(name: str, value: Any) -> Any:
    """As a plain number, whatever library it comes from; None for what is none."""
    try:
        return share(float(value)) if name in _SHARES else whole(operator.index(value))
    except (TypeError, ValueError, OverflowError):
        return None


class WorkerMetricsPublisher:
    """The load side of a `KVPublisher`."""

    def __init__(self, publisher: KVPublisher) -> None:
        self._publisher = publisher

    def publish(
        self,
        *,
        num_requests_waiting: int | None = None,
        gpu_cache_usage_perc: float | None = None,
        gpu_prefix_cache_hit_rate: float | None = None,
        request_active_slots: int | None = None,
        request_total_slots: int | None = None,
        kv_active_blocks: int | None = None,
        kv_total_blocks: int | None = None,
        lora_total_slots: int | None = None,
    ) -> None:
        """Never blocks. None for what is not known; shares are 0–1 (see `indexer.events.LoadReport`)."""
        self._publisher.report(
            RankLoad(
                num_requests_waiting=num_requests_waiting,
                gpu_cache_usage_perc=gpu_cache_usage_perc,
                gpu_prefix_cache_hit_rate=gpu_prefix_cache_hit_rate,
                request_active_slots=request_active_slots,
                request_total_slots=request_total_slots,
                kv_active_blocks=kv_active_blocks,
                kv_total_blocks=kv_total_blocks,
                lora_total_slots=lora_total_slots,
            )
        )
