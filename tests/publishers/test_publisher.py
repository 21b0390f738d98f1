"""A whole publisher between a scripted engine and a receiver that knows only what the event plane brings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engines import problems
from engines.description import EngineDescription, EventSource
from indexer.cursor import View
from indexer.events import (
    NO_EVENTS,
    Cleared,
    EventBatch,
    LoadReport,
    ReplayRequest,
    Stored,
    decode_batch,
    decode_load,
    encode,
    unpack_hashes,
)
from indexer.kv_indexer import KVIndexer
from indexer.types import WorkerRank
from publishers.local_plane import LocalPlane
from publishers.plane import OnRequest, PlaneUnavailable, Unsubscribe, all_events, all_loads, replay_subject
from publishers.publisher import FAILED, EnginePublisher, with_overrides
from tests.fakes.http_engine import HttpEngine, models, running
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import CLEARED, FakeEngine, ours, removed, stored

RANK = WorkerRank("w", 0)
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody answers


class Receiver:
    """The plainest receiver: applies batches in order, forgets with each new epoch."""

    def __init__(self) -> None:
        self.plane = LocalPlane()
        self.batches: list[EventBatch] = []
        self.reports: list[LoadReport] = []
        self.held: set[int] = set()

    async def start(self) -> None:
        await self.plane.start()
        await self.plane.subscribe(all_events("default"), self._on_batch)
        await self.plane.subscribe(all_loads("default"), lambda payload: self.reports.append(decode_load(payload)))

    def _on_batch(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        if not self.batches or batch.epoch != self.batches[-1].epoch:
            assert batch.event_id == 0
            self.held = set()
        else:
            assert batch.event_id == self.batches[-1].event_id + 1
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, Cleared):
                self.held = set()
            elif isinstance(event, Stored):
                self.held |= set(unpack_hashes(event.hashes))
            else:
                self.held -= set(unpack_hashes(event.hashes))

    async def replay(self, epoch: int, event_id: int) -> list[EventBatch]:
        request = encode(ReplayRequest("w", 0, epoch, event_id))
        return [decode_batch(reply) async for reply in self.plane.request(replay_subject("default", RANK), request)]


@asynccontextmanager
async def publishing(
    source: EventSource,
    now_ns: Callable[[], int] = time.time_ns,
    load_interval: float = 0.01,
    replay: str | None = None,
) -> AsyncIterator[tuple[EnginePublisher, Receiver]]:
    receiver = Receiver()
    await receiver.start()
    publisher = EnginePublisher(
        worker_id="w",
        url=NOWHERE,
        plane=receiver.plane,
        description=EngineDescription("vllm", event_sources=(source,)),
        replay=replay,
        load_interval=load_interval,
        replay_timeout=0.5,
        now_ns=now_ns,
    )
    await publisher.start()
    try:
        await until(lambda: publisher.ranks)
        yield publisher, receiver
    finally:
        await publisher.close()
        await receiver.plane.close()


async def test_history_and_live_events_arrive_hashed() -> None:
    async with FakeEngine() as engine:
        await engine.lose(stored(1, 2))
        async with publishing(engine.source) as (publisher, receiver):
            await engine.subscribed()
            await until(lambda: receiver.held == ours(1, 2))
            await engine.publish(stored(3, parent=2))
            await until(lambda: receiver.held == ours(1, 2, 3))
            await engine.publish(removed(3), stored(4, parent=1))
            await until(lambda: receiver.held == ours(1, 2) | ours(1, 4))
            relay = publisher.ranks[0].relay
            assert (relay.exact, publisher.sources[0].connected, len(relay), relay.event_id) == (True, True, 3, 2)
            await engine.publish(CLEARED)
            await until(lambda: receiver.held == set())


async def test_what_an_engine_did_before_it_was_followed_is_told_as_past() -> None:
    """Who counts events would else count it with every start of a router."""
    async with FakeEngine() as engine:
        await engine.lose(stored(1))
        await engine.lose(removed(1))
        async with publishing(engine.source) as (_, receiver):
            await engine.subscribed()
            await until(lambda: len(receiver.batches) == 2)
            await engine.publish(stored(2))
            await engine.lose(stored(3))
            await engine.publish(stored(4))
            await until(lambda: len(receiver.batches) == 5)
            assert [batch.past for batch in receiver.batches] == [True, True, False, False, False]
            asked_again = await receiver.replay(receiver.batches[0].epoch, 1)
            assert [batch.past for batch in asked_again] == [True, False, False, False]
            await engine.restart(stored(7))
            await until(lambda: receiver.held == ours(7))
            assert receiver.batches[-1].past


async def test_a_replay_endpoint_may_be_stated_as_the_engine_is_told_it() -> None:
    async with FakeEngine() as engine:
        await engine.lose(stored(1, 2))
        port = str(engine.source.replay).rpartition(":")[2]
        async with publishing(engine.source_without_replay, replay=f"tcp://*:{port}") as (_, receiver):
            await until(lambda: receiver.held == ours(1, 2))


class Slow(FakeEngine):
    """Has told the first message of what it is asked for, and is not done."""

    async def _answer(self) -> None:
        client, empty, _ = await self._router.recv_multipart()
        await self._router.send_multipart([client, empty, *self._frames(bytes(8), self.payloads[0])])
        await asyncio.Event().wait()


async def test_while_an_engines_history_comes_nobody_says_that_it_has_no_events() -> None:
    """Whoever knew the rank before would take that for the end of them, again and again."""
    async with Slow() as engine:
        await engine.lose(stored(1, 2))
        async with publishing(engine.source) as (_, receiver):
            await until(lambda: receiver.held == ours(1, 2))
            receiver.reports.clear()
            await until(lambda: len(receiver.reports) > 1)
            assert {(report.epoch, report.exact) for report in receiver.reports} == {(receiver.batches[0].epoch, False)}


async def test_a_gap_is_healed_by_the_engines_replay() -> None:
    async with FakeEngine() as engine, publishing(engine.source) as (publisher, receiver):
        await engine.subscribed()
        await engine.publish(stored(1))
        await engine.lose(stored(2, parent=1))
        await engine.publish(stored(3, parent=2))
        await until(lambda: receiver.held == ours(1, 2, 3))
        assert publisher.ranks[0].relay.exact
        assert len({batch.epoch for batch in receiver.batches}) == 1


async def test_an_engine_restart_is_a_new_epoch_and_said_at_once() -> None:
    async with FakeEngine() as engine, publishing(engine.source, load_interval=1000) as (_, receiver):
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1) and receiver.reports)
        old = receiver.batches[-1].epoch
        await engine.restart()
        await until(lambda: receiver.reports[-1].epoch > old)
        assert receiver.reports[-1].event_id == -1
        await until(lambda: receiver.reports[-1].exact)
        await engine.subscribed()
        await engine.publish(stored(2))
        await until(lambda: receiver.held == ours(2))
        assert receiver.batches[-1].epoch > old


async def test_an_engine_that_is_not_heard_is_not_known() -> None:
    async with FakeEngine() as engine:
        source = engine.source
    async with publishing(source) as (_, receiver):
        await until(lambda: len(receiver.reports) >= 3)
        assert {(report.epoch, report.exact) for report in receiver.reports} == {(NO_EVENTS, False)}


async def test_an_engine_that_is_lost_is_not_known_exactly_until_it_is_there_again() -> None:
    async with FakeEngine() as engine, publishing(engine.source) as (_, receiver):
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.reports and receiver.reports[-1].exact)
        epoch = receiver.reports[-1].epoch
        await engine._close()
        await until(lambda: not receiver.reports[-1].exact)
        assert receiver.reports[-1].epoch == epoch
        engine._open()
        await until(lambda: receiver.reports[-1].exact)
        assert receiver.reports[-1].epoch > epoch
        assert receiver.held == ours(1)


async def test_a_short_buffer_is_inexact_until_the_next_clear() -> None:
    async with FakeEngine(buffer=1) as engine:
        for block in range(3):
            await engine.lose(stored(block + 1))
        async with publishing(engine.source) as (publisher, receiver):
            await until(lambda: receiver.held == ours(3))
            await until(lambda: receiver.reports and not receiver.reports[-1].exact)
            await engine.subscribed()
            await engine.publish(CLEARED, stored(4))
            await until(lambda: receiver.reports[-1].exact)
            assert receiver.held == ours(4)
            assert publisher.sources[0].counts.lost_track == 1


async def test_hostile_messages_are_counted_said_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    hostile = [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"a": 1}),
        b"\x91" * 5000,
    ]
    async with FakeEngine() as engine, publishing(engine.source) as (publisher, receiver):
        await engine.subscribed()
        for payload in hostile:
            await engine.publish_raw(payload)
        await engine.publish({"type": "BlockStored", "token_ids": "12345"}, stored(1))
        await until(lambda: receiver.held == ours(1))
        relay = publisher.ranks[0].relay
        assert relay.counts.malformed == len(hostile) + 1
        assert not relay.exact
    assert caplog.text.count("A message of the engine cannot be read") == 1
    assert "12345" not in caplog.text


async def test_adapters_known_by_number_only_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, publishing(engine.source) as (publisher, receiver):
        await engine.subscribed()
        await engine.publish(stored(2) | {"lora_id": 7}, stored(1))
        await engine.publish(stored(3) | {"lora_id": 8}, stored(4))
        await until(lambda: receiver.held == ours(1) | ours(4))
        relay = publisher.ranks[0].relay
        assert (relay.counts.skipped["lora"], relay.exact) == (2, True)
    assert caplog.text.count("name LoRA adapters by number only") == 1


async def test_an_engine_without_replay_is_followed_inexactly() -> None:
    async with FakeEngine() as engine, publishing(engine.source_without_replay) as (_, receiver):
        await engine.subscribed()
        await until(lambda: receiver.reports and not receiver.reports[-1].exact)
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1))


async def test_no_known_event_source_still_reports_that_there_is_a_worker() -> None:
    receiver = Receiver()
    await receiver.start()
    description = EngineDescription("unknown", dp_size=2, total_blocks=30_000)
    publisher = EnginePublisher(worker_id="w", url=NOWHERE, plane=receiver.plane, description=description)
    await publisher.start()
    await until(lambda: len(receiver.reports) == 2)
    await publisher.close()
    assert [(report.rank, report.exact, report.event_id) for report in receiver.reports] == [
        (WorkerRank("w", 0), False, -1),
        (WorkerRank("w", 1), False, -1),
    ]
    for rank in publisher.ranks.values():  # while they fill up, nothing keeps others waiting
        assert 30_000 < len(rank.relay._handles._names) < 100_000


async def test_at_the_end_a_broker_that_hangs_is_waited_for_once_and_not_for_each_rank() -> None:
    all_asked = asyncio.Barrier(3)

    class Hanging(LocalPlane):
        async def serve(self, subject: str, on_request: OnRequest) -> Unsubscribe:
            async def unsubscribe() -> None:
                await all_asked.wait()

            return unsubscribe

    plane = Hanging()
    await plane.start()
    publisher = EnginePublisher(
        worker_id="w", url=NOWHERE, plane=plane, description=EngineDescription("vllm", dp_size=3)
    )
    await publisher.start()
    await until(lambda: len(publisher.ranks) == 3)
    async with asyncio.timeout(15):
        await publisher.close()


@pytest.mark.parametrize("described", [True, False])
async def test_no_known_event_source_is_said_by_who_asked_the_engine(
    caplog: pytest.LogCaptureFixture, described: bool
) -> None:
    """The router, which describes the engine, names flags of its own."""
    receiver = Receiver()
    await receiver.start()
    description = EngineDescription("vllm") if described else None
    async with running(HttpEngine({"/v1/models": models("m")})) as engine:
        publisher = EnginePublisher(
            worker_id="w", url=engine.url, plane=receiver.plane, description=description, load_interval=0.01
        )
        await publisher.start()
        await until(lambda: receiver.reports)
        await publisher.close()
    assert ("--events tcp://HOST:PORT" in caplog.text) is not described


async def test_an_engine_that_others_have_described_is_not_asked_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("publishers.load_poller.MOST_SILENT", 3)
    receiver = Receiver()
    await receiver.start()
    async with running(HttpEngine({"/v1/models": models("m"), "/metrics": (200, b"")})) as engine:
        publisher = EnginePublisher(
            worker_id="w",
            url=engine.url,
            plane=receiver.plane,
            description=EngineDescription("vllm"),
            load_interval=0.001,
        )
        await publisher.start()
        await until(lambda: publisher.load.polls > 8)
        await publisher.close()
    assert {path for path, _ in engine.asked} == {"/metrics"}


async def test_an_engine_that_is_known_to_be_there_is_polled_soon() -> None:
    receiver = Receiver()
    await receiver.start()
    publisher = EnginePublisher(
        worker_id="w",
        url=NOWHERE,
        plane=receiver.plane,
        description=EngineDescription("vllm"),
        load_interval=0.001,
    )
    publisher.look_again()
    await publisher.start()
    await until(lambda: publisher._poller and publisher._poller._left > 100)
    polls = publisher.load.polls
    publisher.look_again()
    assert publisher._poller
    assert publisher._poller._left == 0
    await until(lambda: publisher.load.polls > polls)
    await publisher.close()


async def test_an_engine_that_wants_a_key_is_not_said_to_have_no_events(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    await receiver.start()
    async with running(HttpEngine({"/v1/models": (401, b""), "/metrics": (200, b"sglang:x 1\n")})) as engine:
        publisher = EnginePublisher(worker_id="w", url=engine.url, plane=receiver.plane)
        await publisher.start()
        await until(lambda: publisher.ranks)
        await publisher.close()
    assert "--worker-api-key-file" in caplog.text
    assert "--kv-events-config" not in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [("tcp://10.9.9.9:5557", "--event-host HOST"), ("tcp://*:99999", "nobody can connect to"), (None, "does not say")],
)
async def test_why_an_engines_events_are_not_followed_is_said(
    endpoint: str | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver()
    await receiver.start()
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
    answers = {"/v1/models": models("m")}
    if endpoint:
        answers["/kv_event_sources"] = (200, msgspec.json.encode({"0": config}))
    async with running(HttpEngine(answers)) as engine:
        publisher = EnginePublisher(worker_id="w", url=engine.url, plane=receiver.plane)
        await publisher.start()
        await until(lambda: publisher.ranks)
        await publisher.close()
    told = [record.getMessage() for record in caplog.records if "--events tcp://HOST:PORT" in record.getMessage()]
    assert len(told) == 1
    assert says in told[0]


async def test_events_that_are_too_old_are_neither_followed_nor_called_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever they are: where it is stated as well."""
    receiver = Receiver()
    await receiver.start()
    info = {"version": "0.5.5", "page_size": 4, "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557"}'}
    answers = {"/v1/models": models("m", owned_by="sglang"), "/get_server_info": (200, msgspec.json.encode(info))}
    async with running(HttpEngine(answers)) as engine:
        publisher = EnginePublisher(
            worker_id="w", url=engine.url, plane=receiver.plane, events="tcp://127.0.0.1:5557", load_interval=0.01
        )
        await publisher.start()
        await until(lambda: receiver.reports)
        assert publisher.sources == {}
        await publisher.close()
    assert problems.OLD_EVENTS in caplog.text
    assert "--events tcp://HOST:PORT" not in caplog.text


async def test_a_block_size_that_is_not_the_engines_is_said(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    await receiver.start()
    metrics = b'vllm:cache_config_info{engine="0",block_size="4",num_gpu_blocks="101"} 1.0\n'
    async with running(HttpEngine({"/v1/models": models("m"), "/metrics": (200, metrics)})) as engine:
        publisher = EnginePublisher(worker_id="w", url=engine.url, plane=receiver.plane, block_size=64)
        await publisher.start()
        await until(lambda: publisher.ranks)
        await publisher.close()
    assert "A block size of 64 tokens is stated, but the engine tells 4" in caplog.text


async def test_a_receiver_asks_for_what_it_missed() -> None:
    async with FakeEngine() as engine, publishing(engine.source) as (_, receiver):
        await engine.subscribed()
        for block in range(1, 4):
            await engine.publish(stored(block))
        await until(lambda: len(receiver.batches) == 3)
        epoch = receiver.batches[0].epoch
        assert await receiver.replay(epoch, 1) == receiver.batches[1:]
        assert await receiver.replay(epoch, 3) == []
        (snapshot,) = await receiver.replay(-1, 0)
        assert (snapshot.epoch, snapshot.event_id, snapshot.part, snapshot.parts) == (epoch, 2, 0, 1)
        assert [set(unpack_hashes(one.hashes)) for one in snapshot.events if isinstance(one, Stored)] == [
            ours(1) | ours(2) | ours(3)
        ]
        deep = b"\x95" + encode(ReplayRequest(*RANK, 1, 2))[1:] + b"\x91" * 3000
        for nonsense in (b"\xc1", deep):
            assert [one async for one in receiver.plane.request(replay_subject("default", RANK), nonsense)] == []


async def test_epochs_grow_even_where_the_clock_stands_still() -> None:
    async with FakeEngine() as engine, publishing(engine.source, now_ns=lambda: 7) as (publisher, receiver):
        await engine.subscribed()
        await engine.restart()
        await until(lambda: receiver.reports and receiver.reports[-1].epoch == 8)
    assert publisher.ranks[0].relay.counts.epochs == 1


def vllm_over_http(ranks: list[FakeEngine], behaviour: dict[str, int]) -> web.Application:
    """The HTTP side of a vLLM; `behaviour["status"]` is answered to everything while it is not 200."""

    def config(engine: FakeEngine) -> dict[str, object]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": engine.source.endpoint,
            "replay_endpoint": engine.source.replay,
            "topic": "kv@",
        }

    metrics = """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{engine="0",block_size="4",num_gpu_blocks="101"} 1.0
"""

    async def answer(request: web.Request) -> web.Response:
        behaviour["asked"] += 1
        if behaviour["status"] != 200:
            return web.Response(status=behaviour["status"])
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/kv_event_sources":
                return web.json_response({str(rank): config(engine) for rank, engine in enumerate(ranks)})
            case "/metrics":
                return web.Response(text=metrics)
        return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


async def test_an_engine_is_found_out_about_and_asked_for_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("publishers.publisher.PROBE_INTERVAL", 0.01)
    receiver = Receiver()
    await receiver.start()
    behaviour = {"status": 503, "asked": 0}
    async with FakeEngine() as engine, TestServer(vllm_over_http([engine], behaviour)) as server:
        url = str(server.make_url("/"))
        publisher = EnginePublisher(worker_id="w", url=url, plane=receiver.plane, load_interval=0.01)
        await publisher.start()
        await until(lambda: behaviour["asked"] > 1)
        assert publisher.ranks == {}
        behaviour["status"] = 200
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1))
        await until(lambda: receiver.reports[-1].event_id == 0)
        report = receiver.reports[-1]
        assert (report.num_requests_waiting, report.request_active_slots) == (2, 3)
        assert (report.kv_active_blocks, report.kv_total_blocks) == (50, 101)
        assert (report.gpu_cache_usage_perc, report.gpu_prefix_cache_hit_rate) == (0.5, None)

        behaviour["status"] = 500
        await until(lambda: publisher.load.failures)
        await until(lambda: receiver.reports[-1].num_requests_waiting is None)
        assert receiver.reports[-1].event_id == 0
        await publisher.close()


async def test_where_an_engine_replays_is_followed_though_its_events_come_from_elsewhere() -> None:
    """As where it connects to its publisher, and so names that one's host."""
    receiver = Receiver()
    await receiver.start()
    async with FakeEngine() as engine:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://10.9.9.9:5557",
            "replay_endpoint": engine.source.replay,
        }
        answers = {"/v1/models": models("m"), "/kv_event_sources": (200, msgspec.json.encode({"0": config}))}
        await engine.lose(stored(1, 2))
        async with running(HttpEngine(answers)) as http:
            publisher = EnginePublisher(
                worker_id="w", url=http.url, plane=receiver.plane, events=engine.source.endpoint, load_interval=0.01
            )
            await publisher.start()
            await until(lambda: receiver.held == ours(1, 2))
            await publisher.close()


async def test_an_engine_that_comes_back_elsewhere_is_followed_there() -> None:
    """With another port for its events, and one rank more."""
    receiver = Receiver()
    await receiver.start()
    behaviour = {"status": 200, "asked": 0}
    async with FakeEngine() as before, FakeEngine() as first, FakeEngine() as second:
        ranks = [before]
        async with TestServer(vllm_over_http(ranks, behaviour)) as server:
            url = str(server.make_url("/"))
            publisher = EnginePublisher(worker_id="w", url=url, plane=receiver.plane, load_interval=0.01)
            await publisher.start()
            await before.subscribed()
            await before.publish(stored(1))
            await until(lambda: receiver.held == ours(1))
            polls, source = publisher.load.polls, publisher.sources[0]
            assert source.connected
            behaviour["status"] = 503
            await until(lambda: publisher.load.failures)
            ranks[:] = [first, second]
            behaviour["status"] = 200
            for engine in ranks:
                await engine.subscribed()
            await first.publish(stored(2))
            await until(lambda: receiver.held == ours(2))
            assert receiver.batches[-1].epoch > receiver.batches[0].epoch
            await until(lambda: receiver.reports[-1].dp_rank == 1)
            assert publisher.ranks.keys() == {0, 1}
            assert publisher.load.polls > polls
            assert not source.connected, "nobody follows what is there no more"
            await publisher.close()


async def test_an_engine_that_is_another_before_it_is_polled_again_is_followed_as_that() -> None:
    """Polls may be far apart, and what stands before engines may answer all the while."""
    receiver = Receiver()
    await receiver.start()
    async with FakeEngine() as first, FakeEngine() as second:
        ranks = [first]
        async with TestServer(vllm_over_http(ranks, {"status": 200, "asked": 0})) as server:
            url = str(server.make_url("/"))
            publisher = EnginePublisher(worker_id="w", url=url, plane=receiver.plane, load_interval=0.01)
            await publisher.start()
            await first.subscribed()
            ranks.append(second)
            await first.restart()
            await until(lambda: publisher.ranks.keys() == {0, 1})
            await publisher.close()
            assert publisher.load.failures == 0


async def test_an_engine_that_comes_back_as_it_was_is_followed_on() -> None:
    receiver = Receiver()
    await receiver.start()
    behaviour = {"status": 200, "asked": 0}
    async with FakeEngine() as engine, TestServer(vllm_over_http([engine], behaviour)) as server:
        url = str(server.make_url("/"))
        publisher = EnginePublisher(worker_id="w", url=url, plane=receiver.plane, load_interval=0.01)
        await publisher.start()
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1))
        behaviour["status"] = 503
        await until(lambda: publisher.load.failures)
        behaviour["status"] = 200
        asked = publisher.load.polls
        await until(lambda: publisher.load.polls > asked + 2)
        assert receiver.reports[-1].exact
        assert publisher.ranks[0].relay.counts.epochs == 0
        await engine.publish(stored(2, parent=1))
        await until(lambda: receiver.held == ours(1, 2))
        await publisher.close()


async def test_an_engine_that_does_not_tell_its_block_size_again_is_followed_on() -> None:
    """As one that comes back busy, and does not answer in time all that it is asked."""
    receiver = Receiver()
    await receiver.start()
    metrics = (200, b'vllm:num_requests_running 1\nvllm:cache_config_info{block_size="4"} 1\n')
    async with FakeEngine() as engine:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": engine.source.endpoint,
            "replay_endpoint": engine.source.replay,
        }
        sources = (200, msgspec.json.encode({"0": config}))
        answers = {"/v1/models": models("m"), "/metrics": metrics, "/kv_event_sources": sources}
        async with running(HttpEngine(answers)) as http:
            publisher = EnginePublisher(worker_id="w", url=http.url, plane=receiver.plane, load_interval=0.01)
            await publisher.start()
            await until(lambda: receiver.reports)
            ranks = publisher.ranks

            def last_in_time(_: bytes) -> tuple[int, bytes]:
                http.answers["/metrics"] = (503, b"")
                return sources

            http.answers |= {"/metrics": (503, b""), "/kv_event_sources": last_in_time}
            await until(lambda: publisher.load.failures)
            http.answers["/metrics"] = metrics
            await until(lambda: http.answers["/metrics"] != metrics)
            polls = publisher.load.polls
            await until(lambda: publisher.load.polls > polls + 1)
            assert publisher.ranks is ranks
            await publisher.close()


EVERYTHING = ("/v1/models", "/metrics", "/version", "/kv_event_sources", "/server_info", "/get_server_info")


@pytest.mark.parametrize("before", [(200, b"{}"), models("m")], ids=["unknown", "vllm"])
@pytest.mark.parametrize("seen_away", [False, True])
async def test_an_engine_that_tells_no_load_and_becomes_another_is_followed_as_that(
    before: tuple[int, bytes], seen_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells none with --disable-log-stats, and what is not known none either."""
    monkeypatch.setattr("publishers.publisher.PROBE_INTERVAL", 0.01)
    receiver = Receiver()
    await receiver.start()
    async with FakeEngine() as engine, running(HttpEngine({"/v1/models": before})) as http:
        publisher = EnginePublisher(worker_id="w", url=http.url, plane=receiver.plane, load_interval=0.001)
        await publisher.start()
        await until(lambda: publisher.load.polls > 2)
        if seen_away:
            if before[1] != b"{}":  # one that is asked for its load is seen to come back
                monkeypatch.setattr("publishers.load_poller.MOST_SILENT", 10**9)
            http.answers = dict.fromkeys(EVERYTHING, (503, b""))
            polls = publisher.load.polls
            await until(lambda: publisher.load.polls > polls + 2)
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": engine.source.endpoint,
            "topic": "kv@",
        }
        sources = (200, msgspec.json.encode({"0": config}))
        http.answers = {"/v1/models": models("m"), "/kv_event_sources": sources}
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1))
        await publisher.close()


@pytest.mark.parametrize("stated", [True, False])
async def test_an_older_engine_that_comes_back_with_more_ranks_is_followed_on_all(stated: bool) -> None:
    """One that does not say where it publishes, with --events (`stated`) and without."""
    receiver = Receiver()
    await receiver.start()
    metrics = [
        b'vllm:num_requests_running{engine="%d"} 3.0\nvllm:cache_config_info{engine="%d"} 1\n' % (n, n) for n in (0, 1)
    ]
    before = HttpEngine({"/v1/models": models("m"), "/metrics": (200, metrics[0])})
    async with FakeEngine() as engine, running(before) as http:
        publisher = EnginePublisher(
            worker_id="w",
            url=http.url,
            plane=receiver.plane,
            events=engine.source.endpoint if stated else None,
            load_interval=0.01,
        )
        await publisher.start()
        await until(lambda: receiver.reports and receiver.reports[-1].request_active_slots)
        http.answers = dict.fromkeys(EVERYTHING, (503, b""))
        await until(lambda: publisher.load.failures)
        http.answers = {"/v1/models": models("m"), "/metrics": (200, b"".join(metrics))}
        await until(lambda: receiver.reports[-1].dp_rank == 1 and receiver.reports[-1].request_active_slots)
        http.answers = dict.fromkeys(EVERYTHING, (404, b""))  # of a proxy before it, say
        probes = http.asked.count(("/v1/models", b""))
        failures = publisher.load.failures
        await until(lambda: publisher.load.failures > failures + 40)
        assert http.asked.count(("/v1/models", b"")) > probes
        assert publisher.ranks.keys() == {0, 1}
        await publisher.close()


def troubles(caplog: pytest.LogCaptureFixture, message: str) -> list[object]:
    """What such lines of the log name as the cause; None where they name none."""
    said = [record for record in caplog.records if record.getMessage() == message]
    return [record.__dict__["fields"].get("trouble") for record in said]


async def test_why_an_engine_does_not_answer_yet_is_said_once_for_each_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("publishers.publisher.PROBE_INTERVAL", 0.01)
    receiver = Receiver()
    await receiver.start()
    async with running(HttpEngine({"/v1/models": (503, b"")})) as engine:
        publisher = EnginePublisher(worker_id="w", url=engine.url, plane=receiver.plane)
        await publisher.start()
        await until(lambda: len(engine.asked) > 20)
    await until(lambda: len(troubles(caplog, "The engine does not answer yet")) == 2)
    await publisher.close()
    causes = ["/v1/models answered 503", "cannot be reached: Connection refused"]
    assert troubles(caplog, "The engine does not answer yet") == causes


async def test_an_engine_that_cannot_be_asked_for_its_load_is_told_from_one_that_tells_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = Receiver()
    await receiver.start()
    async with running(HttpEngine({"/metrics": (200, b"")})) as engine:
        described = EngineDescription("vllm")
        publisher = EnginePublisher(worker_id="w", url=engine.url, plane=receiver.plane, description=described)
        await publisher.start()
        await until(lambda: troubles(caplog, "The engine does not report its load"))
        await publisher.close()
    async with publishing(EventSource(0, NOWHERE)):
        await until(lambda: len(troubles(caplog, "The engine does not report its load")) == 2)
    assert troubles(caplog, "The engine does not report its load") == [None, "cannot be reached: Connection refused"]


async def test_closing_at_any_time_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    plane = LocalPlane()
    await plane.start()
    never_started = EnginePublisher(worker_id="w", url=NOWHERE, plane=plane)
    await never_started.close()
    probing = EnginePublisher(worker_id="w", url=NOWHERE, plane=plane)
    await probing.start()
    await asyncio.sleep(0)
    await probing.close()
    async with FakeEngine() as engine, publishing(engine.source):
        pass
    assert asyncio.all_tasks() == before


async def test_a_publisher_that_is_closed_answers_no_more() -> None:
    async with FakeEngine() as engine, publishing(engine.source) as (publisher, receiver):
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1))
        assert await receiver.replay(receiver.batches[0].epoch, 0)
        await publisher.close()
        with pytest.raises(PlaneUnavailable):
            await receiver.replay(receiver.batches[0].epoch, 0)


async def test_a_wrong_endpoint_is_said_and_the_load_still_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing(EventSource(0, "nonsense")) as (_, receiver):
        await until(lambda: receiver.reports)
        assert not receiver.reports[-1].exact
    assert "Its events cannot be followed" in caplog.text


FOUND = (EventSource(0, "tcp://h:5557", "tcp://h:5600", "kv@"), EventSource(1, "tcp://h:5558", None, "kv@"))


@pytest.mark.parametrize(
    ("found", "events", "replay", "expected"),
    [
        (FOUND, None, None, FOUND),
        (
            FOUND,
            "tcp://x:1",
            "tcp://x:11",
            (EventSource(0, "tcp://x:1", "tcp://x:11", "kv@"), EventSource(1, "tcp://x:2", "tcp://x:12", "kv@")),
        ),
        (FOUND[:1], None, "tcp://x:11", (EventSource(0, "tcp://h:5557", "tcp://x:11", "kv@"),)),
        ((), "tcp://*:1", None, (EventSource(0, "tcp://*:1"), EventSource(1, "tcp://*:2"))),
        ((), "ipc:///tmp/kv", None, (EventSource(0, "ipc:///tmp/kv"), EventSource(1, "ipc:///tmp/kv"))),
        ((), None, "tcp://x:11", ()),
    ],
)
def test_what_an_operator_states_wins(
    found: tuple[EventSource, ...], events: str | None, replay: str | None, expected: tuple[EventSource, ...]
) -> None:
    description = EngineDescription("vllm", block_size=16, dp_size=2, event_sources=found)
    assert with_overrides(description, events, replay, None).event_sources == expected
    assert with_overrides(description, events, replay, None).block_size == 16
    assert with_overrides(description, events, replay, 32).block_size == 32


async def test_closing_can_be_cancelled_and_done_again() -> None:
    """By whoever looks after a worker, when that is told to leave: who went on then would never end."""
    publisher = EnginePublisher(worker_id="w", url=NOWHERE, plane=LocalPlane())
    await publisher.start()
    await asyncio.sleep(0)
    closing = asyncio.create_task(publisher.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await publisher.close()


class FailingPlane(LocalPlane):
    """Raises what nobody expects to the publisher's own task."""

    failures = 0

    def publish(self, subject: str, payload: bytes) -> None:
        task = asyncio.current_task()
        if self.failures and task and task.get_name() == "publisher of w":
            self.failures -= 1
            raise RuntimeError("theirs")
        super().publish(subject, payload)


@asynccontextmanager
async def failing(engine: FakeEngine, restart_delay: float) -> AsyncIterator[tuple[FailingPlane, Receiver, KVIndexer]]:
    """A publisher, what it says, and what a router makes of it."""
    receiver, indexer = Receiver(), KVIndexer()
    plane = receiver.plane = FailingPlane()
    indexer.watch(RANK)
    await receiver.start()
    await plane.subscribe(all_events("default"), lambda payload: none(indexer.on_batch(decode_batch(payload))))
    await plane.subscribe(all_loads("default"), lambda payload: none(indexer.on_report(decode_load(payload))))
    publisher = EnginePublisher(
        worker_id="w",
        url=NOWHERE,
        plane=plane,
        description=EngineDescription("vllm", event_sources=(engine.source,)),
        load_interval=0.01,
        restart_delay=restart_delay,
    )
    await publisher.start()
    await engine.subscribed()
    await engine.publish(stored(1))
    await until(lambda: receiver.held == ours(1) and indexer.view(RANK) is View.EXACT)
    try:
        yield plane, receiver, indexer
    finally:
        await publisher.close()


def none(_: object) -> None:
    pass


async def test_after_a_failure_that_nobody_foresaw_it_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, failing(engine, restart_delay=0) as (plane, receiver, indexer):
        old = receiver.batches[-1].epoch
        plane.failures = 5
        await until(lambda: receiver.batches[-1].epoch > old and receiver.held == ours(1))
        await until(lambda: indexer.view(RANK) is View.EXACT)
        await engine.publish(stored(2, parent=1))
        await until(lambda: receiver.held == ours(1, 2))
    told = [record.exc_info for record in caplog.records if record.getMessage() == FAILED]
    assert len(told) > 1
    assert [bool(trace) for trace in told] == [True] + [False] * (len(told) - 1)


async def test_what_nobody_follows_after_a_failure_is_not_taken_for_exact(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, failing(engine, restart_delay=1000) as (plane, _, indexer):
        plane.failures = 1
        await until(lambda: indexer.view(RANK) is View.RECOVERING)
    assert FAILED in caplog.messages


async def test_what_an_engine_held_that_came_back_without_events_is_not_taken_for_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would be for ever: nothing more is ever said of it."""
    receiver = Receiver()
    await receiver.start()
    behaviour = {"status": 200, "asked": 0}
    ranks: list[FakeEngine] = []
    async with FakeEngine() as engine, TestServer(vllm_over_http(ranks, behaviour)) as server:
        ranks.append(engine)
        url = str(server.make_url("/"))
        publisher = EnginePublisher(worker_id="w", url=url, plane=receiver.plane, load_interval=0.01)
        await publisher.start()
        await engine.subscribed()
        await engine.publish(stored(1))
        await until(lambda: receiver.held == ours(1) and receiver.reports[-1].exact)
        behaviour["status"] = 503
        await engine._close()
        await until(lambda: publisher.load.failures and not receiver.reports[-1].exact)
        ranks.clear()
        behaviour["status"] = 200
        await until(lambda: receiver.reports[-1].epoch == NO_EVENTS)
        engine._open()  # after all
        await until(lambda: receiver.reports[-1].exact)
        await publisher.close()
    assert "does not say where it publishes KV events" in caplog.text
