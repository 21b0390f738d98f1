"""One behaviour for every event plane: in-process, and NATS with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from indexer.types import WorkerRank
from publishers.connect import make_plane
from publishers.plane import (
    EventPlane,
    PlaneUnavailable,
    all_events,
    all_loads,
    events_subject,
    load_subject,
    replay_subject,
)
from tests.nats_fixture import running_nats_server

SUBJECT = events_subject("default", WorkerRank("w.0", 0))


class Ends(NamedTuple):
    """One plane as two parties see it (in-process: the same object)."""

    publisher: EventPlane
    router: EventPlane


class Inbox:
    """Collects what is delivered; `take` waits for as many messages as asked for."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    def __call__(self, payload: bytes) -> None:
        self._messages.put_nowait(payload)

    async def take(self, count: int) -> list[bytes]:
        async with asyncio.timeout(30):
            return [await self._messages.get() for _ in range(count)]

    @property
    def empty(self) -> bool:
        return self._messages.empty()


@pytest_asyncio.fixture(params=["local", pytest.param("nats", marks=pytest.mark.nats)])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    if request.param == "local":
        plane = make_plane("local")
        await plane.start()
        yield Ends(plane, plane)
        await plane.close()
        return
    async with running_nats_server() as server:
        both = Ends(make_plane(server.url), make_plane(server.url))
        for plane in both:
            await plane.start()
        yield both
        for plane in both:
            await plane.close()


async def collect(replies: AsyncIterator[bytes]) -> list[bytes]:
    return [reply async for reply in replies]


async def test_messages_arrive_in_the_publishers_order(ends: Ends) -> None:
    inbox = Inbox()
    await ends.router.subscribe(SUBJECT, inbox)
    sent = [str(i).encode() for i in range(500)]
    for payload in sent:
        ends.publisher.publish(SUBJECT, payload)
    assert await inbox.take(500) == sent


async def test_a_subscription_counts_from_the_moment_it_was_awaited(ends: Ends) -> None:
    for attempt in range(20):
        inbox = Inbox()
        unsubscribe = await ends.router.subscribe(SUBJECT, inbox)
        ends.publisher.publish(SUBJECT, str(attempt).encode())
        assert await inbox.take(1) == [str(attempt).encode()]
        await unsubscribe()


async def test_a_wildcard_takes_everything_below_and_nothing_beside(ends: Ends) -> None:
    events, loads = Inbox(), Inbox()
    await ends.router.subscribe(all_events("default"), events)
    await ends.router.subscribe(all_loads("default"), loads)
    for rank in (WorkerRank("10.0.0.1:8000", 0), WorkerRank("b *>", 3)):
        ends.publisher.publish(events_subject("other", rank), b"another namespace")
        ends.publisher.publish(events_subject("default", rank), f"event {rank}".encode())
        ends.publisher.publish(load_subject("default", rank), f"load {rank}".encode())
    assert await events.take(2) == [b"event 10.0.0.1:8000#0", b"event b *>#3"]
    assert await loads.take(2) == [b"load 10.0.0.1:8000#0", b"load b *>#3"]
    assert events.empty
    assert loads.empty


async def test_every_subscriber_gets_every_message(ends: Ends) -> None:
    first, second = Inbox(), Inbox()
    await ends.router.subscribe(SUBJECT, first)
    await ends.router.subscribe(all_events("default"), second)
    ends.publisher.publish(SUBJECT, b"x")
    assert await first.take(1) == await second.take(1) == [b"x"]


async def test_nothing_arrives_after_unsubscribing(ends: Ends) -> None:
    gone, still = Inbox(), Inbox()
    unsubscribe = await ends.router.subscribe(SUBJECT, gone)
    await ends.router.subscribe(SUBJECT, still)
    await unsubscribe()
    await unsubscribe()  # twice is no fault
    ends.publisher.publish(SUBJECT, b"x")
    assert await still.take(1) == [b"x"]
    assert gone.empty


async def test_a_failing_subscriber_harms_nobody_and_goes_on(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()

    def fail_once(payload: bytes) -> None:
        inbox(payload)
        if payload == b"bad":
            raise RuntimeError("a fault of the subscriber's own")

    await ends.router.subscribe(SUBJECT, fail_once)
    ends.publisher.publish(SUBJECT, b"bad")
    ends.publisher.publish(SUBJECT, b"good")
    assert await inbox.take(2) == [b"bad", b"good"]
    assert "a fault of the subscriber's own" in caplog.text


async def test_a_request_gets_all_replies_in_order_until_the_end_mark(ends: Ends) -> None:
    subject = replay_subject("default", WorkerRank("w", 0))
    replies = [b"part %d" % i * 1000 for i in range(30)]

    def answer(payload: bytes) -> list[bytes]:
        assert payload == b"question"
        return replies

    stop = await ends.publisher.serve(subject, answer)
    assert await collect(ends.router.request(subject, b"question")) == replies
    assert await collect(ends.router.request(subject, b"question")) == replies
    await stop()
    with pytest.raises(PlaneUnavailable, match="nobody serves"):
        await collect(ends.router.request(subject, b"question"))


async def test_a_request_may_have_no_reply_at_all(ends: Ends) -> None:
    await ends.publisher.serve("kv.default.replay.w.0", lambda _: ())
    assert await collect(ends.router.request("kv.default.replay.w.0", b"")) == []


async def test_requests_at_the_same_time_do_not_mix(ends: Ends) -> None:
    await ends.publisher.serve("echo", lambda payload: [payload] * 3)
    answers = await asyncio.gather(*(collect(ends.router.request("echo", b"%d" % i)) for i in range(20)))
    assert answers == [[b"%d" % i] * 3 for i in range(20)]


async def test_a_reader_may_stop_early(ends: Ends) -> None:
    await ends.publisher.serve("echo", lambda payload: [payload] * 3)
    async for reply in ends.router.request("echo", b"x"):
        assert reply == b"x"
        break
    assert await collect(ends.router.request("echo", b"y")) == [b"y"] * 3


async def test_nobody_serves(ends: Ends) -> None:
    with pytest.raises(PlaneUnavailable, match="nobody serves"):
        await collect(ends.router.request("kv.default.replay.w.0", b""))


async def test_replies_are_made_before_anything_else_is_published(ends: Ends) -> None:
    inbox = Inbox()
    await ends.router.subscribe("events", inbox)
    state = 0

    def snapshot(_: bytes) -> Iterator[bytes]:
        for _part in range(5):
            yield b"%d" % state

    await ends.publisher.serve("snapshot", snapshot)
    request = asyncio.create_task(collect(ends.router.request("snapshot", b"")))
    while not request.done():
        state += 1
        ends.publisher.publish("events", b"%d" % state)
        await asyncio.sleep(0)
    assert len(set(await request)) == 1


async def test_closing_leaves_no_task_and_may_be_repeated(ends: Ends) -> None:
    await ends.router.subscribe(SUBJECT, Inbox())
    await ends.publisher.serve("echo", lambda payload: [payload])
    assert await collect(ends.router.request("echo", b"x")) == [b"x"]
    assert ends.router.connected
    for plane in (*ends, *ends):
        await plane.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task for task in left if task.get_name() != "nats-server"] == []
    assert not ends.router.connected
    ends.publisher.publish(SUBJECT, b"into the void")
    with pytest.raises(PlaneUnavailable):
        await collect(ends.router.request("echo", b"x"))
