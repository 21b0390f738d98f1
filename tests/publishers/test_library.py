from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from indexer.events import (
    EventBatch,
    LoadReport,
    ReplayRequest,
    Stored,
    decode_batch,
    decode_load,
    encode,
    pack_hashes,
    unpack_hashes,
)
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace, Tier, WorkerRank
from publishers.library import KVPublisher, WorkerMetricsPublisher
from publishers.local_plane import LocalPlane
from publishers.plane import all_events, all_loads, replay_subject
from tests.fakes.waiting import until

TOKENS = list(range(12))


class Side:
    """A plane and what arrives on it."""

    def __init__(self) -> None:
        self.plane = LocalPlane()
        self.batches: list[EventBatch] = []
        self.reports: list[LoadReport] = []

    async def start(self) -> None:
        await self.plane.start()
        await self.plane.subscribe(all_events("ns"), lambda payload: self.batches.append(decode_batch(payload)))
        await self.plane.subscribe(all_loads("ns"), lambda payload: self.reports.append(decode_load(payload)))


async def test_an_engine_of_ones_own_is_published() -> None:
    side = Side()
    await side.start()
    publisher = KVPublisher(side.plane, "w", 2, 4, namespace="ns")
    await publisher.start()
    publisher.stored([b"a", b"b"], None, TOKENS[:8], lora_name="l", cache_salt="s")
    publisher.stored([b"c"], b"b", TOKENS[8:], tier=Tier.CPU)
    publisher.removed([b"a"])
    publisher.cleared()
    await publisher.close()
    hashes = chain_hashes(pack_tokens(TOKENS), 4, root_hash(Namespace("l", "s")))
    assert [batch.rank for batch in side.batches] == [WorkerRank("w", 2)] * 4
    assert [batch.event_id for batch in side.batches] == [0, 1, 2, 3]
    assert side.batches[0].events == [Stored(Tier.GPU, pack_hashes(hashes[:2]))]
    assert side.batches[1].events == [Stored(Tier.CPU, pack_hashes(hashes[2:]))]


async def test_what_is_wrong_is_counted_and_never_raised() -> None:
    publisher = KVPublisher(LocalPlane(), "w", 0, 4)
    publisher.stored([1], None, [1, 2, 3])
    publisher.stored([1], 99, [1, 2, 3, 4])
    publisher.stored([1], None, [1, 2, 3, -4])
    publisher.removed([99])
    assert (publisher.counts.malformed, publisher.counts.orphans, publisher.counts.batches) == (2, 1, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"block_hashes": None}, {"token_ids": None}, {"lora_name": 5}, {"cache_salt": b"x"}, {"tier": "GPU"}, {"tier": 7}],
)
async def test_what_is_of_a_wrong_type_is_counted_too(wrong: dict[str, Any]) -> None:
    publisher = KVPublisher(LocalPlane(), "w", 0, 4)
    publisher.stored(**{"block_hashes": [1], "parent_block_hash": None, "token_ids": TOKENS[:4], **wrong})
    assert (publisher.counts.malformed, publisher.counts.stored) == (1, 0)


async def test_a_removal_of_a_wrong_type_is_counted_too() -> None:
    publisher = KVPublisher(LocalPlane(), "w", 0, 4)
    publisher.removed(None)  # type: ignore[arg-type]
    publisher.removed([None])  # type: ignore[list-item]
    publisher.removed([1], "GPU")  # type: ignore[arg-type]
    assert publisher.counts.malformed == 3


@pytest.mark.parametrize("namespace", ["", "my fleet", "a.b", "*", ">"])
async def test_a_namespace_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="a namespace takes letters"):
        KVPublisher(LocalPlane(), "w", 0, 4, namespace=namespace)


async def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        KVPublisher(LocalPlane(), "w", 0, 0)


@pytest.mark.parametrize("worker_id", ["", "http://gpu-1:8000", "gpu 1"])
async def test_what_no_worker_is_called_is_refused(worker_id: str) -> None:
    """Without a name it has no subject on the event plane, whose connection would break down again and again."""
    with pytest.raises(ValueError, match="the worker's name in the router"):
        KVPublisher(LocalPlane(), worker_id, 0, 4)


async def test_a_rank_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0: -1 is none"):
        KVPublisher(LocalPlane(), "w", -1, 4)


async def test_figures_are_sent_at_once_and_repeated_with_the_last_event_id() -> None:
    side = Side()
    await side.start()
    publisher = KVPublisher(side.plane, "w", 0, 4, namespace="ns", report_interval=0.01)
    metrics = WorkerMetricsPublisher(publisher)
    await publisher.start()
    metrics.publish(request_active_slots=3, gpu_cache_usage_perc=0.5)
    publisher.stored([1], None, TOKENS[:4])
    await until(lambda: len(side.reports) >= 3 and side.reports[-1].event_id == 0)
    await publisher.close()
    last = side.reports[-1]
    assert (last.request_active_slots, last.gpu_cache_usage_perc, last.num_requests_waiting) == (3, 0.5, None)
    assert last.epoch == side.batches[0].epoch


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests_waiting": -1},
        {"request_active_slots": 2.5},
        {"kv_total_blocks": 2**70},
        {"kv_active_blocks": "7"},
        {"gpu_cache_usage_perc": math.nan},
        {"gpu_prefix_cache_hit_rate": 1.5},
    ],
)
async def test_a_figure_that_is_none_is_counted_and_the_report_goes_without_it(wrong: dict[str, Any]) -> None:
    side = Side()
    await side.start()
    publisher = KVPublisher(side.plane, "w", 0, 4, namespace="ns")
    await publisher.start()
    WorkerMetricsPublisher(publisher).publish(**{"request_total_slots": 8, **wrong})
    await until(lambda: side.reports[-1:] and side.reports[-1].request_total_slots == 8)
    await publisher.close()
    assert {getattr(side.reports[-1], name) for name in wrong} == {None}
    assert publisher.counts.malformed == 1


async def test_numbers_of_numpy_are_numbers() -> None:
    side = Side()
    await side.start()
    publisher = KVPublisher(side.plane, "w", np.int64(0), 4, namespace="ns")  # type: ignore[arg-type]
    await publisher.start()
    names = np.array([2**63 + 5, 6], np.uint64)
    publisher.stored(names.tolist()[:1], None, TOKENS[:4])
    publisher.stored(names[1:], names[0], np.array(TOKENS[4:8]))  # type: ignore[arg-type] # as good as a sequence
    WorkerMetricsPublisher(publisher).publish(
        num_requests_waiting=np.int64(3),  # type: ignore[arg-type]
        gpu_cache_usage_perc=np.float32(0.5),  # type: ignore[arg-type]
    )
    await until(lambda: side.reports[-1:] and side.reports[-1].num_requests_waiting == 3)
    await publisher.close()
    assert side.reports[-1].gpu_cache_usage_perc == 0.5
    assert (publisher.counts.stored, publisher.counts.orphans, publisher.counts.malformed) == (2, 0, 0)


async def test_what_the_plane_did_not_take_can_be_asked_for() -> None:
    side = Side()
    await side.start()
    publisher = KVPublisher(side.plane, "w", 0, 4, namespace="ns")
    await publisher.start()
    for block in range(10):
        side.plane.connected = block < 3
        publisher.stored([block], None, [block] * 4)
    side.plane.connected = True
    assert [batch.event_id for batch in side.batches] == [0, 1, 2]
    request = encode(ReplayRequest("w", 0, side.batches[0].epoch, 3))
    subject = replay_subject("ns", WorkerRank("w", 0))
    missed = [decode_batch(reply) async for reply in side.plane.request(subject, request)]
    assert [batch.event_id for batch in missed] == list(range(3, 10))
    everything = [one for batch in missed for event in batch.events if isinstance(event, Stored) for one in
                  unpack_hashes(event.hashes)]  # fmt: skip
    assert everything == [chain_hashes(pack_tokens([block] * 4), 4, 0)[0] for block in range(3, 10)]
    await publisher.close()


async def test_closing_leaves_no_task() -> None:
    publisher = KVPublisher(LocalPlane(), "w", 0, 4)
    await publisher.close()
    await publisher.start()
    await publisher.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_can_be_cancelled_and_done_again() -> None:
    publisher = KVPublisher(LocalPlane(), "w", 0, 4)
    await publisher.start()
    await asyncio.sleep(0)
    closing = asyncio.create_task(publisher.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await publisher.close()
