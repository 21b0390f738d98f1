"""What comes over the event plane reaches the index and the load book; what makes no sense reaches neither."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from indexer.cursor import View
from indexer.events import (
    EventBatch,
    LoadReport,
    Removed,
    ReplayRequest,
    Stored,
    decode_replay_request,
    encode,
    pack_hashes,
)
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier, WorkerRank
from publishers.local_plane import LocalPlane
from publishers.plane import events_subject, load_subject, replay_subject
from router.events.ingest import MOST_REPLAYS, STRANGER_PATIENCE, Ingest
from router.metrics.registry import Metrics
from router.scheduling.load import Load, LoadBook
from tests.fakes.waiting import until

RANK, OTHER = WorkerRank("w.1:80", 0), WorkerRank("w.1:80", 1)
NAMESPACE = "fleet"


class BreakablePlane(LocalPlane):
    """The local plane, but it can lose its connection and be slow to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.reconnected: list[Callable[[], None]] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.waiting = 0
        """Requests that have no answer yet."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.reconnected.append(callback)

    def reconnect(self) -> None:
        for callback in self.reconnected:
            callback()

    async def request(self, subject: str, payload: bytes) -> AsyncIterator[bytes]:
        self.waiting += 1
        await self.answering.wait()
        self.waiting -= 1
        async for reply in super().request(subject, payload):
            yield reply


class Publisher:
    """Scripted: says what it is told to, and answers replays with all it ever said."""

    def __init__(self, plane: LocalPlane, rank: WorkerRank = RANK) -> None:
        self.plane, self.rank = plane, rank
        self.batches: list[EventBatch] = []
        self.asked: list[ReplayRequest] = []

    async def serve(self) -> None:
        await self.plane.serve(replay_subject(NAMESPACE, self.rank), self._answer)

    def _answer(self, payload: bytes) -> list[bytes]:
        request = decode_replay_request(payload)
        self.asked.append(request)
        return [encode(batch) for batch in self.batches if batch.event_id >= request.event_id]

    def make(self, *events: Stored | Removed) -> EventBatch:
        batch = EventBatch(*self.rank, 1, len(self.batches), list(events))
        self.batches.append(batch)
        return batch

    async def store(self, *blocks: int) -> None:
        batch = self.make(Stored(Tier.GPU, pack_hashes(blocks)))
        self.plane.publish(events_subject(NAMESPACE, self.rank), encode(batch))

    def lose(self, *blocks: int) -> None:
        self.make(Stored(Tier.GPU, pack_hashes(blocks)))

    async def report(self, running: int | None = None) -> None:
        figures = LoadReport(*self.rank, 1, len(self.batches) - 1, True, request_active_slots=running)
        self.plane.publish(load_subject(NAMESPACE, self.rank), encode(figures))


class Ends:
    """A publisher on one end, the router's state on the other."""

    def __init__(self) -> None:
        self.plane = BreakablePlane()
        self.publisher, self.other = Publisher(self.plane), Publisher(self.plane, OTHER)
        self.indexer, self.book, self.metrics = KVIndexer(), LoadBook(), Metrics()
        self.now = 50.0
        self.ingest = Ingest(self.plane, NAMESPACE, self.indexer, self.book, self.metrics, lambda: self.now)
        for rank in (RANK, OTHER):
            self.indexer.watch(rank)
            self.book.watch(rank, 16)

    def held(self, rank: WorkerRank = RANK) -> set[int]:
        return self.indexer.index.dump().get((rank, Tier.GPU), set())

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def replays(self, outcome: str) -> float:
        return self.count("router_replays_total", outcome=outcome)

    def undecodable(self, kind: str) -> float:
        return self.count("router_undecodable_messages_total", kind=kind)


@asynccontextmanager
async def following() -> AsyncIterator[Ends]:
    ends = Ends()
    before = asyncio.all_tasks()
    await ends.plane.start()
    await ends.ingest.start()
    yield ends
    await ends.ingest.close()
    await ends.plane.close()
    assert asyncio.all_tasks() == before


async def test_batches_reach_the_index_rank_by_rank() -> None:
    async with following() as ends:
        await ends.publisher.store(1, 2)
        await ends.other.store(3)
        removed = ends.publisher.make(Removed(Tier.GPU, pack_hashes([2])))
        ends.plane.publish(events_subject(NAMESPACE, RANK), encode(removed))
        assert (ends.held(), ends.held(OTHER)) == ({1}, {3})
        assert ends.indexer.view(RANK) is View.EXACT


async def test_reports_reach_the_book_with_the_time_they_came() -> None:
    async with following() as ends:
        await ends.publisher.report(running=3)
        ends.now += 2
        assert ends.book.load(RANK, ends.now) == Load(3)
        assert ends.book.get_metrics(ends.now)[RANK].age == 2
        assert ends.book.load(OTHER, ends.now) == Load()


async def test_two_publishers_that_speak_for_one_rank_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As with a --worker-id that was copied, or a publisher beside the plug-in: what each says of its engine comes and
    goes, and nothing would say why."""

    def warned() -> int:
        return caplog.text.count("Two publishers speak for one rank")

    async with following() as ends:
        await ends.publisher.store(1)
        await ends.other.report()
        older = LoadReport(*RANK, 0, 7, True)
        for _ in range(3):  # the last of one that has ended, late
            ends.plane.publish(load_subject(NAMESPACE, RANK), encode(older))
        await ends.publisher.report()
        ends.ingest.tick()
        assert not warned()
        for _ in range(10):
            ends.plane.publish(load_subject(NAMESPACE, RANK), encode(older))
            await ends.publisher.report()
            ends.ingest.tick()
        assert warned() == 1
        told = [record.__dict__["fields"] for record in caplog.records if "Two publishers" in record.getMessage()]
        assert told == [{"worker": "w.1:80", "dp_rank": 0}]


async def test_another_namespace_is_not_heard() -> None:
    async with following() as ends:
        batch = ends.publisher.make(Stored(Tier.GPU, pack_hashes([1])))
        ends.plane.publish(events_subject("strangers", RANK), encode(batch))
        assert ends.held() == set()


async def test_a_gap_is_closed_by_a_replay() -> None:
    async with following() as ends:
        await ends.publisher.serve()
        await ends.publisher.store(1)
        ends.publisher.lose(2)
        await ends.publisher.store(3)
        assert ends.held() == {1}
        assert ends.indexer.view(RANK) is View.RECOVERING
        await until(lambda: ends.replays("answered"))
        assert ends.held() == {1, 2, 3}
        assert ends.indexer.view(RANK) is View.EXACT
        assert ends.publisher.asked == [ReplayRequest(*RANK, 1, 1)]
        assert ends.other.asked == []


async def test_a_replay_that_nobody_answers_is_asked_for_again_at_the_next_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following() as ends:
        ends.publisher.lose(1)
        await ends.publisher.store(2)
        await until(lambda: ends.replays("unanswered") == 1)
        assert ends.held() == set()
        await ends.publisher.store(3)  # by itself no reason to ask again: whoever did not answer would not now
        await asyncio.sleep(0)
        assert ends.replays("unanswered") == 1
        await ends.publisher.report()
        await until(lambda: ends.replays("unanswered") == 2)
        await ends.publisher.serve()
        await ends.publisher.report()
        await until(lambda: ends.replays("answered") == 1)
        assert ends.held() == {1, 2, 3}
        assert ends.indexer.view(RANK) is View.EXACT
    assert caplog.text == ""  # publishers end and start again: that is no fault


async def test_a_publisher_that_fails_to_answer_counts_as_unanswered(caplog: pytest.LogCaptureFixture) -> None:
    def fail(payload: bytes) -> list[bytes]:
        raise OSError

    async with following() as ends:
        await ends.plane.serve(replay_subject(NAMESPACE, RANK), fail)
        await ends.publisher.report()
        ends.publisher.lose(1)
        await ends.publisher.store(2)
        await until(lambda: ends.replays("unanswered") == 1)
    assert "failed" in caplog.text


async def test_a_replay_that_ends_in_a_fault_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault that nobody expects")

    async with following() as ends:
        await ends.publisher.serve()
        with monkeypatch.context() as faulty:
            faulty.setattr(ends.plane, "request", fail)
            ends.publisher.lose(1)
            await ends.publisher.store(2)
            await until(lambda: ends.replays("unanswered") == 1)
        await ends.publisher.report()
        await until(lambda: ends.held() == {1, 2})
    assert "a fault that nobody expects" in caplog.text


async def test_a_reconnect_asks_every_rank_that_was_ever_heard() -> None:
    async with following() as ends:
        for publisher in (ends.publisher, ends.other):
            await publisher.serve()
        await ends.publisher.store(1)
        ends.publisher.lose(2)
        ends.plane.reconnect()
        await until(lambda: ends.replays("answered") == 1)
        assert ends.held() == {1, 2}
        assert ends.other.asked == []
        await ends.other.store(5)
        ends.plane.reconnect()
        await until(lambda: ends.replays("answered") == 3)
        assert ends.publisher.asked == [ReplayRequest(*RANK, 1, 1), ReplayRequest(*RANK, 1, 2)]
        assert ends.other.asked == [ReplayRequest(*OTHER, 1, 1)]


async def test_of_a_large_fleet_a_few_ranks_at_a_time_are_asked() -> None:
    """The broker would disconnect a router for which the answers of all wait, and it would ask all of them again."""
    ranks = [WorkerRank(f"w{number}", 0) for number in range(5 * MOST_REPLAYS)]
    async with following() as ends:
        publishers = [Publisher(ends.plane, rank) for rank in ranks]
        for publisher in publishers:
            ends.indexer.watch(publisher.rank)
            await publisher.serve()
            await publisher.store(1)
            publisher.lose(2)
        ends.plane.answering.clear()
        ends.plane.reconnect()
        await until(lambda: ends.plane.waiting > 0)
        await asyncio.sleep(0.01)
        assert ends.plane.waiting == MOST_REPLAYS
        ends.plane.answering.set()
        await until(lambda: ends.replays("answered") == len(ranks))
        assert all(ends.held(rank) == {1, 2} for rank in ranks)


async def test_time_goes_on_by_itself_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a rank that falls silent would be believed for ever."""
    monkeypatch.setattr("router.events.ingest.TICK", 0.0)
    async with following() as ends:
        ends.ingest._knows = lambda _: False
        stranger = Publisher(ends.plane, WorkerRank("stranger", 0))

        async def is_told_of() -> None:
            while not strangers_told(caplog):
                await stranger.report()
                await asyncio.sleep(0)

        await asyncio.wait_for(is_told_of(), 30)
        await ends.ingest.close()
        ticks = ends.ingest._ticks
        for _ in range(5):
            await asyncio.sleep(0)
        assert ends.ingest._ticks == ticks


async def test_closing_ends_the_replays_under_way_and_begins_no_more() -> None:
    async with following() as ends:
        before = asyncio.all_tasks()
        ends.plane.answering.clear()
        await ends.publisher.store(1)
        ends.plane.reconnect()
        assert len(asyncio.all_tasks()) == len(before) + 1
        await ends.ingest.close()
        assert asyncio.all_tasks() == before
        ends.plane.reconnect()
        ends.publisher.lose(2)
        await ends.publisher.store(3)
        assert asyncio.all_tasks() == before


DEEP = b"\x91" * 100_000 + b"\x00"
GOOD = encode(EventBatch(*RANK, 1, 0, [Stored(Tier.GPU, pack_hashes([1]))]))
GOOD_REPORT = encode(LoadReport(*RANK, 1, 0, True, request_active_slots=5, kv_active_blocks=5))

NONSENSE = {
    "empty": b"",
    "json": b'{"worker_id": "w"}',
    "nil": b"\xc0",
    "truncated": GOOD[:-3],
    "truncated report": GOOD_REPORT[:-1],
    "trailing": GOOD + b"\x00",
    "trailing report": GOOD_REPORT + b"\x00",
    "not utf-8": b"\x95\xa1\xff\x01\x01\x00\x90",
    "text for a number": msgspec.msgpack.encode([*RANK, "1", 0, []]),
    "unknown tier": msgspec.msgpack.encode([*RANK, 1, 0, [["s", 9, b""]]]),
    "window below none": encode(EventBatch(*RANK, 1, 0, [Stored(Tier.GPU, pack_hashes([1]), -1)])),
    "window beyond reason": encode(EventBatch(*RANK, 1, 0, [Removed(Tier.GPU, pack_hashes([1]), 2**31)])),
    "unknown event": msgspec.msgpack.encode([*RANK, 1, 0, [["x"]]]),
    "text for hashes": msgspec.msgpack.encode([*RANK, 1, 0, [["s", 0, 7]]]),
    "claims four billion events": msgspec.msgpack.encode([*RANK, 1, 0])[:1] + b"\xa1w\x00\x01\x00\xdd\xff\xff\xff\xff",
    "nested beyond reason": b"\x9d" + msgspec.msgpack.encode([*RANK, 1, 0, []])[1:] + b"\x00\x00\x01" + DEEP * 5,
    "report nested beyond reason": b"\x9d" + GOOD_REPORT[1:] + DEEP,
    "report of more requests than there can be": encode(LoadReport(*RANK, 1, 0, True, request_active_slots=2**31)),
    "report of more blocks than there can be": encode(LoadReport(*RANK, 1, 0, True, kv_active_blocks=2**63)),
    "report of blocks below none": encode(LoadReport(*RANK, 1, 0, True, kv_total_blocks=-1)),
}


@pytest.mark.parametrize("payload", NONSENSE.values(), ids=NONSENSE.keys())
async def test_nonsense_is_counted_and_changes_nothing(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with following() as ends:
        await ends.publisher.store(1)
        await ends.publisher.report(running=2)
        state = (repr(ends.indexer.index.dump()), ends.book.get_metrics(ends.now), dict(ends.indexer.counts))
        for subject, kind in ((events_subject(NAMESPACE, RANK), "events"), (load_subject(NAMESPACE, RANK), "load")):
            for _ in range(3):
                ends.plane.publish(subject, payload)
            assert ends.undecodable(kind) == 3
        assert (repr(ends.indexer.index.dump()), ends.book.get_metrics(ends.now), dict(ends.indexer.counts)) == state
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [record.__dict__["fields"] for record in told] == [{"kind": "events"}, {"kind": "load"}]
        assert all("a publisher of another version" in record.message for record in told)
        await ends.publisher.store(2)
        assert ends.held() == {1, 2}


async def test_random_bytes_never_stop_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(11)
    async with following() as ends:
        await ends.publisher.store(1)
        for _ in range(500):
            for good, subject in (
                (GOOD, events_subject(NAMESPACE, RANK)),
                (GOOD_REPORT, load_subject(NAMESPACE, RANK)),
            ):
                spoiled = bytearray(good)
                spoiled[source.randrange(len(good))] = source.randrange(256)
                ends.plane.publish(subject, source.randbytes(source.randrange(40)))
                ends.plane.publish(subject, bytes(spoiled[: source.randrange(len(good) + 1)]))
        assert ends.undecodable("events") >= 500
        assert ends.undecodable("load") >= 500
        assert not [record for record in caplog.records if record.exc_info]
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def seconds_pass(ends: Ends, seconds: int) -> None:
    for _ in range(seconds):
        ends.ingest.tick()


def strangers_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["fields"]["worker"] for record in caplog.records if "--worker-id" in record.message]


async def test_a_publisher_of_a_worker_that_is_none_of_ours_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with following() as ends:
        ends.ingest._knows = lambda name: name == "not up yet"
        for _ in range(3):
            for number in range(200):
                for name in ("not up yet", f"{number}" + "x" * 1000):
                    stranger = Publisher(ends.plane, WorkerRank(name, 0))
                    await stranger.store(1)
                    await stranger.report()
                    await stranger.store(2)
            seconds_pass(ends, STRANGER_PATIENCE)
        await ends.publisher.store(1)
    assert strangers_told(caplog) == [(f"{number}" + "x" * 1000)[:128] for number in range(100)]


async def test_publishers_of_workers_that_leave_are_no_strangers_and_do_not_hide_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A publisher ends some seconds after its worker has left, and may start some before it joins."""
    async with following() as ends:
        ends.ingest._knows = lambda _: False
        for number in range(200):
            await Publisher(ends.plane, WorkerRank(f"gone-{number}", 0)).report()
            seconds_pass(ends, STRANGER_PATIENCE - 1)
            await Publisher(ends.plane, WorkerRank(f"gone-{number}", 0)).report()
        assert strangers_told(caplog) == []
        mistaken = Publisher(ends.plane, WorkerRank("mistaken", 0))
        for _ in range(STRANGER_PATIENCE + 1):
            await mistaken.report()
            seconds_pass(ends, 1)
    assert strangers_told(caplog) == ["mistaken"]


async def test_one_that_is_ours_for_a_while_is_told_of_when_it_is_no_more(caplog: pytest.LogCaptureFixture) -> None:
    ours = set[str]()
    async with following() as ends:
        ends.ingest._knows = ours.__contains__
        publisher = Publisher(ends.plane, WorkerRank("w", 0))
        for change in (ours.add, ours.discard, ours.add, ours.discard):
            for _ in range(STRANGER_PATIENCE + 1):
                await publisher.report()
                seconds_pass(ends, 1)
            change("w")
    assert strangers_told(caplog) == ["w", "w"]


@pytest.mark.parametrize(
    ("fate", "payload"),
    [
        ("unknown_worker", encode(EventBatch("stranger", 0, 1, 0, []))),
        ("malformed", encode(EventBatch(*RANK, 1, 1, [Stored(Tier.GPU, b"1234567")]))),
        ("malformed", encode(EventBatch(*RANK, -1, 1, []))),
        ("malformed", encode(EventBatch(*RANK, 1, 1, [], part=3, parts=2))),
        ("other_hash_version", encode(EventBatch(*RANK, 1, 1, [], hash_version=99))),
        ("stale", GOOD),
    ],
)
async def test_what_can_be_read_but_not_used_is_counted_by_its_fate(fate: str, payload: bytes) -> None:
    async with following() as ends:
        await ends.publisher.store(1)
        ends.plane.publish(events_subject(NAMESPACE, RANK), payload)
        assert ends.indexer.counts == {"applied": 1, fate: 1}
        assert ends.held() == {1}
        await ends.publisher.store(2)
        assert ends.held() == {1, 2}
