"""What only a plane with a broker can get wrong: losing it."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg

import publishers.nats_plane
from publishers.credentials import NatsFiles
from publishers.embedded_nats import NatsServer
from publishers.nats_access import SafeClient
from publishers.nats_plane import NatsPlane
from publishers.plane import PlaneUnavailable
from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.waiting import until
from tests.nats_accounts import make_nkey
from tests.nats_fixture import nats_server, running_nats_server

pytestmark = pytest.mark.nats
__all__ = ["nats_server"]


class Count:
    """Counts calls; `reached` waits for a number of them."""

    def __init__(self) -> None:
        self.value = 0
        self._changed = asyncio.Condition()

    def __call__(self, *_: object) -> None:
        self.value += 1
        self._notifying = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def reached(self, value: int) -> None:
        async with asyncio.timeout(15), self._changed:
            await self._changed.wait_for(lambda: self.value >= value)


async def collect(replies: AsyncIterator[bytes]) -> list[bytes]:
    return [reply async for reply in replies]


async def test_traffic_flows_again_after_the_server_was_away(nats_server: NatsServer) -> None:
    publisher, router = NatsPlane([nats_server.url]), NatsPlane([nats_server.url])
    back, received = Count(), Count()
    for plane in (publisher, router):
        plane.on_reconnect(back)
        await plane.start()
    await router.subscribe("events", received)
    await publisher.serve("echo", lambda payload: [payload])

    await nats_server.stop()
    await until(lambda: not publisher.connected and not router.connected)
    publisher.publish("events", b"lost")
    assert publisher.dropped == 1
    with pytest.raises(PlaneUnavailable, match="no connection"):
        await collect(router.request("echo", b"x"))
    assert back.value == 0

    await nats_server.start()
    await back.reached(2)
    assert await collect(router.request("echo", b"x")) == [b"x"]
    publisher.publish("events", b"again")
    await received.reached(1)
    for plane in (publisher, router):
        await plane.close()
    assert received.value == 1


async def test_a_plane_may_start_before_its_server(caplog: pytest.LogCaptureFixture) -> None:
    async with running_nats_server() as server:
        await server.stop()
        plane = NatsPlane([server.url])
        back, received = Count(), Count()
        plane.on_reconnect(back)
        await plane.start()
        assert not plane.connected
        assert "cannot be reached yet" in caplog.text
        await plane.subscribe("events", received)
        plane.publish("events", b"nobody hears this")

        await server.start()
        await back.reached(1)
        assert plane.connected
        plane.publish("events", b"x")
        await received.reached(1)
        await plane.close()
    assert plane.dropped == 1


async def test_while_the_file_with_the_seed_is_gone_nobody_waits_and_it_is_told_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.nats_plane, "RECONNECT_WAIT", 0.01)
    seed = tmp_path / "seed"
    plane = NatsPlane([nats_server.url], files=NatsFiles(nkey_seed=str(seed)))
    async with asyncio.timeout(30):
        await plane.start()
    await asyncio.sleep(0.1)
    assert not plane.connected
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
        "NATS cannot be reached yet"
    ]
    seed.write_text(make_nkey(random.Random(0)).seed)
    await until(lambda: plane.connected)
    await plane.close()


async def test_of_a_server_that_says_nothing_it_is_told_that_none_answers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs, an HTTP server, or a host behind a firewall."""
    monkeypatch.setattr(publishers.nats_plane, "CONNECT_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plane = NatsPlane([f"nats://127.0.0.1:{silent.getsockname()[1]}"])
        await plane.start()
        await plane.close()
    [record] = [record for record in caplog.records if "cannot be reached yet" in record.message]
    assert "no NATS server answers there" in str(record.__dict__["fields"]["error"])


async def test_of_a_server_that_hangs_up_before_a_greeting_it_is_told_why_that_may_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with `handshake_first: true`."""
    monkeypatch.setattr(publishers.nats_plane, "RECONNECT_WAIT", 0)
    times = 0

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal times
        times += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        plane = NatsPlane([f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        await plane.start()
        await until(lambda: times > 2)
        await plane.close()
    [record] = [record for record in caplog.records if record.levelno > logging.INFO]
    assert "before it greets: handshake_first" in str(record.__dict__["fields"]["error"])


async def test_closing_while_the_server_is_away_leaves_no_task() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        plane = NatsPlane([f"nats://127.0.0.1:{silent.getsockname()[1]}"])
        starting = asyncio.create_task(plane.start())
        await asyncio.sleep(0)
        await plane.close()
        starting.cancel()
        await asyncio.wait([starting])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_full_buffer_drops_and_counts(nats_server: NatsServer) -> None:
    plane = NatsPlane([nats_server.url], pending_limit=10_000)
    await plane.start()
    for _ in range(20):  # without a turn of the loop nothing can be written
        plane.publish("events", bytes(1000))
    assert 10 <= plane.dropped <= 12
    await plane.close()


async def test_messages_larger_than_the_server_takes_are_dropped_and_told_of_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    plane = NatsPlane([nats_server.url])
    received = Count()
    await plane.start()
    await plane.subscribe("events", received)
    for size in (2_000_000, 3_000_000):
        plane.publish("events", bytes(size))
    plane.publish("events", b"small")
    await received.reached(1)
    assert plane.dropped == 2
    assert caplog.text.count("max_payload") == 1
    await plane.close()


REPLIES = [bytes([i]) * 1000 for i in range(100)]


async def test_an_answer_larger_than_the_buffer_arrives_whole(nats_server: NatsServer) -> None:
    publisher, router = NatsPlane([nats_server.url], pending_limit=10_000), NatsPlane([nats_server.url])
    for plane in (publisher, router):
        await plane.start()
    await publisher.serve("snapshot", lambda _: REPLIES)
    assert await collect(router.request("snapshot", b"")) == REPLIES
    assert publisher.dropped == 0
    for plane in (publisher, router):
        await plane.close()


async def test_a_large_answer_leaves_room_for_events(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, router = NatsPlane([nats_server.url], pending_limit=10_000), NatsPlane([nats_server.url])
    received, sent = Count(), Count()
    for plane in (publisher, router):
        await plane.start()
    await router.subscribe("events", received)
    await publisher.serve("snapshot", lambda _: REPLIES)
    wait = publishers.nats_plane._round_trip

    async def publish_and_wait(client: SafeClient) -> None:
        for _ in range(3):
            publisher.publish("events", bytes(1000))
            sent()
        await wait(client)

    monkeypatch.setattr(publishers.nats_plane, "_round_trip", publish_and_wait)
    assert await collect(router.request("snapshot", b"")) == REPLIES
    monkeypatch.undo()
    assert sent.value >= 3
    assert publisher.dropped == 0
    await received.reached(sent.value)
    for plane in (publisher, router):
        await plane.close()


async def test_a_connection_lost_amid_an_answer_holds_up_nothing(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, router = NatsPlane([nats_server.url], pending_limit=10_000), NatsPlane([nats_server.url])
    back = Count()
    for plane in (publisher, router):
        plane.on_reconnect(back)
        await plane.start()
    await publisher.serve("snapshot", lambda _: REPLIES)

    async def lose(_: SafeClient) -> None:
        await nats_server.stop()
        await until(lambda: not publisher.connected)

    monkeypatch.setattr(publishers.nats_plane, "_round_trip", lose)
    asking = asyncio.create_task(collect(router.request("snapshot", b"")))
    await until(lambda: publisher.dropped > 50)  # the rest, at once
    asking.cancel()
    await asyncio.wait([asking])
    monkeypatch.undo()

    await nats_server.start()
    await back.reached(2)
    assert await collect(router.request("snapshot", b"")) == REPLIES
    for plane in (publisher, router):
        await plane.close()


async def test_a_silent_server_side_is_a_timeout(nats_server: NatsServer) -> None:
    plane = NatsPlane([nats_server.url], reply_timeout=0.05)
    await plane.start()
    await plane.subscribe("deaf", lambda _: None)
    with pytest.raises(PlaneUnavailable, match=r"no answer on deaf within 0\.05 s"):
        await collect(plane.request("deaf", b"x"))
    await plane.close()


async def test_an_answer_ends_with_the_connection_over_which_it_came(nats_server: NatsServer) -> None:
    router, publisher = NatsPlane([nats_server.url], reply_timeout=60), SafeClient()
    await router.start()
    await publisher.connect([nats_server.url])

    async def begin(msg: Msg) -> None:
        await publisher.publish(msg.reply, b"and so on")

    await publisher.subscribe("replay", cb=begin)
    await publishers.nats_plane._round_trip(publisher)  # a flush of nats-py's overtakes what waits to be written
    answer = router.request("replay", b"")
    assert await anext(answer) == b"and so on"
    await nats_server.stop()
    with pytest.raises(PlaneUnavailable, match="lost amid an answer"):
        async with asyncio.timeout(30):
            await anext(answer)
    await publisher.close()
    await router.close()


async def test_it_comes_back_when_nats_py_has_given_up(nats_server: NatsServer) -> None:
    plane = NatsPlane([nats_server.url])
    back, received = Count(), Count()
    plane.on_reconnect(back)
    await plane.start()
    await plane.subscribe("events", received)
    assert plane._client is not None
    await plane._client.close()
    await back.reached(1)
    plane.publish("events", b"x")
    await received.reached(1)
    await plane.close()


async def test_nobody_waits_for_a_library_that_fails_and_it_is_tried_again(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = Count()

    async def fail(*_: object, **__: object) -> None:
        failed()
        raise RuntimeError("theirs")

    plane, back = NatsPlane([nats_server.url]), Count()
    plane.on_reconnect(back)
    monkeypatch.setattr(publishers.nats_plane, "RECONNECT_WAIT", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(SafeClient, "connect", fail)
        async with asyncio.timeout(30):
            await plane.start()
        await failed.reached(3)
        assert not plane.connected
    await back.reached(1)
    assert plane.connected
    assert caplog.messages.count("The connection to NATS broke down") == 1
    await plane.close()


async def test_that_messages_come_too_fast_is_told_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    for _ in range(2):
        await plane._on_error(nats.errors.SlowConsumerError("events", "", 1, None))  # type: ignore[arg-type]
    await plane.close()
    assert caplog.text.count("Messages came too fast") == 1


async def test_what_is_not_permitted_for_each_of_many_subjects_fills_no_log(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    for number in range(1000):
        await plane._on_error(nats.errors.Error(f"nats: permissions violation for subscription to w{number}"))
    await plane.close()
    assert 1 < caplog.text.count("does not permit our user") < 100


@pytest.mark.parametrize("error", [ConnectionResetError("lost"), nats.errors.UnexpectedEOF(), RuntimeError("theirs")])
async def test_only_what_nobody_expects_is_an_error(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    await plane._on_error(error)
    await plane.close()
    assert bool([record for record in caplog.records if record.exc_info]) == isinstance(error, RuntimeError)


async def test_a_plane_that_is_closed_tells_of_no_loss(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    await plane.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_what_waits_for_no_reply_is_no_request(nats_server: NatsServer) -> None:
    plane, asked = NatsPlane([nats_server.url]), list[bytes]()

    def answer(payload: bytes) -> list[bytes]:
        asked.append(payload)
        return [payload]

    await plane.start()
    await plane.serve("echo", answer)
    plane.publish("echo", b"to nobody")
    assert await collect(plane.request("echo", b"x")) == [b"x"]
    assert asked == [b"x"]
    await plane.close()


async def test_credentials_stay_out_of_what_is_shown() -> None:
    plane = NatsPlane(["nats://user:secret@127.0.0.1:1"])
    assert repr(plane) == "NatsPlane(nats://127.0.0.1:1, away)"


async def test_what_is_subscribed_while_a_connection_is_given_up_comes_over_the_next(nats_server: NatsServer) -> None:
    """As when credentials expire: nats-py closes the client, and it takes a moment until there is another."""
    plane, received = NatsPlane([nats_server.url]), Count()
    await plane.start()
    assert plane._client is not None
    await plane._client.close()
    await plane.subscribe("events", received)
    await until(lambda: plane.connected)
    plane.publish("events", b"x")
    await received.reached(1)
    await plane.close()


async def test_what_is_no_longer_subscribed_does_not_come_over_the_next_connection(nats_server: NatsServer) -> None:
    plane, gone, received = NatsPlane([nats_server.url]), Count(), Count()
    await plane.start()
    unsubscribe = await plane.subscribe("events", gone)
    await plane.subscribe("events", received)
    await unsubscribe()
    assert plane._client is not None
    await plane._client.close()
    await until(lambda: plane.connected)
    plane.publish("events", b"x")
    await received.reached(1)
    await plane.close()
    assert gone.value == 0


async def test_requests_leave_no_subscription(nats_server: NatsServer) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    await plane.serve("echo", lambda payload: [payload])
    assert plane._client is not None
    kept = []
    for _ in range(3):
        assert await collect(plane.request("echo", b"x")) == [b"x"]
        kept.append(len(plane._client._subs))
    assert kept == kept[:1] * 3
    await plane.close()


async def test_closing_can_be_cancelled(nats_server: NatsServer) -> None:
    plane = NatsPlane([nats_server.url])
    await plane.start()
    closing = asyncio.create_task(plane.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await plane.close()


async def test_a_server_that_takes_nothing_any_more_is_left_for_another(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may be gone, or it hangs: what was to be written to it can never be."""
    monkeypatch.setattr(publishers.nats_plane, "PING_INTERVAL", 0.05)
    async with FaultyProxy(nats_server.host, nats_server.port) as proxy:
        plane = NatsPlane([f"nats://127.0.0.1:{proxy.port}"])
        await plane.start()
        proxy.stall(True)
        client, before = plane._client, proxy.accepted
        assert client is not None
        while client.is_connected and client.pending_data_size < 1 << 20:  # until no buffer on the way takes any more
            plane.publish("events", bytes(1 << 16))
            await asyncio.sleep(0)
        await until(lambda: proxy.accepted > before)
        proxy.stall(False)
        await until(lambda: plane.connected)
        await plane.close()
