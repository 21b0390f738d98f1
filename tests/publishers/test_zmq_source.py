from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

import publishers.zmq_source
import publishers.zmtp_socket
from engines.description import EventSource
from publishers.zmq_sequence import TRIES
from publishers.zmq_source import NOBODY_THERE, TWO_ENGINES, ZmqSource
from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import CLEARED, FakeEngine, stored


class Log:
    """An EventSink that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[bytes | str] = []
        self.fail_on: bytes | None = None
        self.caught_up: list[bool] = []

    def apply(self, payload: bytes, past: bool) -> None:
        if payload == self.fail_on:
            raise RuntimeError("a fault of the sink's own")
        self.said.append(payload)

    def new_epoch(self) -> None:
        self.said.append("new epoch")

    def lose_track(self) -> None:
        self.said.append("lost track")

    def follow(self, caught_up: bool) -> None:
        self.caught_up.append(caught_up)


@asynccontextmanager
async def following(
    source: EventSource, replay_timeout: float = 5.0, connect_patience: float | None = 60.0
) -> AsyncIterator[tuple[Log, ZmqSource]]:
    log = Log()
    subject = ZmqSource(source, log, replay_timeout=replay_timeout, connect_patience=connect_patience)
    subject.start()
    try:
        yield log, subject
    finally:
        await subject.close()


def this_epoch(said: list[bytes | str]) -> list[bytes | str]:
    """What was said since the last new epoch. A message that comes with the news of a lost connection, on another
    socket, may still be taken for the next of the old one."""
    return said[len(said) - said[::-1].index("new epoch") :] if "new epoch" in said else []


async def test_history_first_then_what_is_live() -> None:
    async with FakeEngine() as engine:
        await engine.lose(stored(0))
        await engine.lose(stored(1))
        async with following(engine.source) as (log, subject):
            await engine.subscribed()
            await until(lambda: len(log.said) == 2)
            await engine.publish(stored(2))
            await until(lambda: len(log.said) == 3)
            assert log.said == engine.payloads
            assert engine.replays_asked == [0]
            assert subject.connected
            assert subject.counts.replayed == 2


async def test_it_says_when_all_is_here_and_when_that_is_over() -> None:
    async with FakeEngine() as engine:
        await engine.lose(stored(0))
        async with following(engine.source) as (log, _):
            await until(lambda: log.caught_up == [True])
            assert len(log.said) == 1
            await engine.restart(stored(7))
            await until(lambda: log.caught_up == [True, False, True])
            assert this_epoch(log.said) == engine.payloads


async def test_while_an_engine_does_not_answer_for_what_is_missing_not_all_is_here() -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, _):
        await until(lambda: log.caught_up == [True])
        engine.deaf = True
        await engine.publish(stored(0))
        await engine.lose(stored(1))
        await engine.publish(stored(2))
        await until(lambda: log.caught_up == [True, False])


@pytest.mark.parametrize("topic_in_replay", [True, False])
async def test_a_gap_is_replayed(topic_in_replay: bool) -> None:
    async with FakeEngine(topic_in_replay=topic_in_replay) as engine, following(engine.source) as (log, _):
        await engine.subscribed()
        await engine.publish(stored(0))
        await engine.lose(stored(1))
        await engine.publish(stored(2))
        await until(lambda: len(log.said) == 3)
        assert log.said == engine.payloads


async def test_a_buffer_that_is_too_short_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(buffer=2) as engine:
        for block in range(5):
            await engine.lose(stored(block))
        async with following(engine.source) as (log, subject):
            await until(lambda: len(log.said) == 3)
            assert log.said == ["lost track", *engine.payloads[3:]]
            assert subject.counts.lost_track == 1
    assert "(buffer_steps in its --kv-events-config)" in caplog.text


async def test_an_engine_that_restarts_is_followed_from_its_beginning() -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, subject):
        await engine.subscribed()
        await engine.publish(stored(0))
        await until(lambda: len(log.said) == 1)
        old = list(engine.payloads)
        await engine.restart(stored(7))  # its next number is the one that was expected next
        await engine.subscribed()
        for block in (8, 9, 10):  # those after the first come when all that was missing is here
            await engine.publish(stored(block))
            await until(lambda: this_epoch(log.said) == engine.payloads)
        assert log.said[:1] == old
        assert log.said.count("new epoch") == 1
        assert subject.counts.connections == 2


@pytest.mark.parametrize(("patience", "said"), [(0.0, [NOBODY_THERE]), (None, [])], ids=["once", "by others"])
async def test_whoever_speaks_no_zmq_is_told_of(
    patience: float | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And not with each attempt, of which there are ten a second."""
    attempts: list[asyncio.BaseTransport] = []

    class HangsUp(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            attempts.append(transport)
            transport.close()

    server = await asyncio.get_running_loop().create_server(HangsUp, "127.0.0.1", 0)
    nobody = EventSource(0, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tcp://127.0.0.1:1")
    async with server, following(nobody, connect_patience=patience) as (log, subject):
        await until(lambda: len(attempts) > 3)
        assert not subject.connected
        assert not log.said
    assert caplog.messages == said


async def test_whoever_is_there_in_time_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, subject):
        await until(lambda: log.caught_up == [True])
        subject._miss()
    assert NOBODY_THERE not in caplog.messages


async def test_a_lost_connection_is_doubt_enough() -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, _):
        await engine.subscribed()
        await engine.publish(stored(0))
        await until(lambda: len(log.said) == 1)
        await engine.break_connection()
        await until(lambda: len(log.said) == 3)
        assert log.said == [*engine.payloads, "new epoch", *engine.payloads]


async def assert_events_come_without_replay(engine: FakeEngine, log: Log, subject: ZmqSource) -> None:
    await engine.subscribed()
    await until(lambda: subject.connected)
    await engine.publish(stored(0))
    await engine.lose(stored(1))
    await engine.publish(CLEARED)
    await until(lambda: len(log.said) == 4)
    assert log.said == ["lost track", engine.payloads[0], "lost track", engine.payloads[2]]


async def test_no_replay_is_said_once_and_events_still_come(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, following(engine.source_without_replay) as (log, subject):
        await assert_events_come_without_replay(engine, log, subject)
        assert engine.replays_asked == []
    assert caplog.text.count("offers no replay") == 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_a_replay_that_cannot_be_asked_for_is_said_once_and_events_still_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeEngine() as engine:
        source = msgspec.structs.replace(engine.source, replay="tcp://127.0.0.1:*")
        async with following(source) as (log, subject):
            await assert_events_come_without_replay(engine, log, subject)
    assert caplog.text.count("No replay of the engine's events can be asked for") == 1


async def test_an_unanswered_replay_does_not_hold_up_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(deaf=True) as engine, following(engine.source, replay_timeout=0.02) as (log, _):
        await engine.subscribed()
        await engine.publish(stored(0))
        await until(lambda: log.said == engine.payloads)
        await engine.lose(stored(1))
        while "lost track" not in log.said:  # it goes on as long as the engine may only be standing still
            await engine.publish(stored(2))
            await asyncio.sleep(0.01)
        lost = log.said.index("lost track")
        await until(lambda: log.said == [*engine.payloads[:lost], "lost track", *engine.payloads[lost + 1 :]])
        (told,) = [record for record in caplog.records if "replay" in record.getMessage()]
        assert "does not answer" in told.getMessage()
        assert told.__dict__["fields"] == {"endpoint": engine.source.endpoint, "replay": engine.source.replay}


async def test_an_engine_that_stood_still_is_known_exactly_when_it_goes_on() -> None:
    async with FakeEngine(deaf=True) as engine:
        await engine.lose(stored(0))
        async with following(engine.source, replay_timeout=0.01) as (log, subject):
            await until(lambda: subject.counts.replays > 3 * TRIES)
            assert log.said == []
            engine.deaf = False
            await until(lambda: log.caught_up == [True])
            assert log.said == engine.payloads


async def test_hostile_frames_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, subject):
        await engine.subscribed()
        for _ in range(3):
            await engine.send([b"kv@"])
            await engine.send([b"kv@", b"1", b"x"])
            await engine.send([b"kv@", b"\xff" * 8, b""])
            await engine.send([b"kv@", bytes(8), b"x", b"more"])
        await engine.publish(stored(0))
        await until(lambda: log.said == engine.payloads)
        assert subject.counts.malformed == {"wrong number of frames": 6, "no sequence number": 6}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


class Rambling(FakeEngine):
    """Says much that is no part of an answer before it answers."""

    async def _answer(self) -> None:
        client, empty, _ = await self._router.recv_multipart()
        for nonsense in ([], [b"1", b"x"], [b"kv@", bytes(7), b"x"], [b"kv@", bytes(8), b"x", b"more"]):
            await self._router.send_multipart([client, empty, *nonsense])
        for seq, payload in (*enumerate(self.payloads), (2**64 - 1, b"")):
            await self._router.send_multipart([client, empty, *self._frames(seq.to_bytes(8, "big"), payload)])


async def test_hostile_frames_amid_a_replay_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Rambling() as engine:
        await engine.lose(stored(0))
        async with following(engine.source) as (log, subject):
            await until(lambda: log.caught_up == [True])
            assert log.said == engine.payloads
            assert subject.counts.malformed == {"wrong replay frames": 4}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_a_message_without_end_ends_the_connection_and_another_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers.zmtp_socket, "AFTER_VIOLATION", 0.01)
    monkeypatch.setattr(publishers.zmq_source, "MOST_BYTES", 1000)
    async with FakeEngine() as engine, following(engine.source_without_replay) as (log, subject):
        await engine.subscribed()
        await until(lambda: subject.connected)
        await engine.publish_raw(bytes(1000 - 1))
        await engine.publish_raw(bytes(1001))
        await until(lambda: not subject.connected)
        await engine.restart()
        await engine.subscribed()
        await engine.publish_raw(b"small")
        await until(lambda: log.said[-3:] == ["new epoch", "lost track", b"small"])
    assert all(len(said) < 1000 for said in log.said)


async def test_more_hostile_frames_than_are_read_at_once_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers.zmtp_socket, "TURN", 2)
    async with FakeEngine() as engine, following(engine.source) as (log, subject):
        await engine.subscribed()
        for _ in range(20):
            await engine.send([b"kv@"])
        await until(lambda: subject.counts.messages == 20)
        await engine.publish(stored(0))
        await until(lambda: log.said == engine.payloads)


async def test_a_number_out_of_reach_is_survived() -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, _):
        await engine.subscribed()
        await engine.publish(stored(0))
        await engine.send([b"kv@", (2**63).to_bytes(8, "big"), b"?"])
        await until(lambda: log.said[1:] == ["lost track", b"?"])
        await engine.publish(stored(1))
        await until(lambda: log.said[3:] == ["new epoch", *engine.payloads])


async def test_a_sink_that_fails_loses_one_message(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, _):
        await engine.subscribed()
        log.fail_on = b"bad"
        await engine.publish_raw(b"bad")
        await engine.publish_raw(b"good")
        await until(lambda: log.said == ["lost track", b"good"])
    assert "a fault of the sink's own" in caplog.text


async def test_a_fault_that_ends_the_stream_is_said_and_does_not_hinder_closing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a fault of the sink's own")

    async with FakeEngine() as engine, following(engine.source_without_replay) as (log, subject):
        monkeypatch.setattr(log, "lose_track", fail)
        await until(lambda: log.caught_up == [False])
        assert not subject.connected
    assert caplog.text.count("are not followed any more") == 1
    assert "a fault of the sink's own" in caplog.text


async def test_after_a_fault_that_ended_the_stream_it_begins_anew() -> None:
    class Faulty(Log):
        faults = 2

        def follow(self, caught_up: bool) -> None:
            super().follow(caught_up)
            if caught_up and self.faults:
                self.faults -= 1
                raise RuntimeError("a fault of the sink's own")

    async with FakeEngine() as engine:
        await engine.lose(stored(0))
        log = Faulty()
        subject = ZmqSource(engine.source, log, restart_delay=0)
        subject.start()
        await until(lambda: log.caught_up == [True, False, True, False, True])
        assert this_epoch(log.said) == engine.payloads
        await engine.publish(stored(1))
        await until(lambda: this_epoch(log.said) == engine.payloads)
        await subject.close()


async def test_other_topics_are_not_ours() -> None:
    async with FakeEngine() as engine, following(engine.source) as (log, subject):
        await engine.subscribed()
        await engine.send([b"load", bytes(8), b"x"])
        await engine.publish(stored(0))
        await until(lambda: log.said == engine.payloads)
        assert subject.counts.messages == 1


def replay_port(engine: FakeEngine) -> int:
    return int((engine.source.replay or "").rpartition(":")[2])


async def test_a_replay_is_asked_for_again_where_its_connection_is_lost() -> None:
    async with FakeEngine(deaf=True) as engine, FaultyProxy("127.0.0.1", replay_port(engine)) as proxy:
        source = EventSource(0, engine.source.endpoint, f"tcp://127.0.0.1:{proxy.port}", engine.source.topic)
        async with following(source, replay_timeout=60.0) as (log, _):
            await until(lambda: engine.replays_asked)
            engine.deaf = False
            await engine.publish(stored(1))
            proxy.cut()
            await until(lambda: log.caught_up == [True])
            assert (engine.replays_asked, log.said) == ([0, 0], engine.payloads)


async def test_many_messages_at_once_keep_their_order() -> None:
    async with FakeEngine(buffer=5000) as engine:
        for block in range(3000):
            await engine.lose(stored(block))
        async with following(engine.source) as (log, _):
            await engine.subscribed()
            for block in range(500):
                await engine.publish(stored(block))
            await until(lambda: len(log.said) >= 3500)
            assert log.said == engine.payloads


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5557", "tcp://127.0.0.1", "http://h:1"])
async def test_a_wrong_endpoint_is_said_at_start(endpoint: str) -> None:
    source = ZmqSource(EventSource(0, endpoint), Log())
    with pytest.raises(ValueError, match="cannot be used for events"):
        source.start()
    await source.close()


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:5557", "tcp://localhost:5557", "ipc:///tmp/nobody-is-here"])
async def test_an_endpoint_may_be_of_any_kind(endpoint: str) -> None:
    async with following(EventSource(0, endpoint)) as (_, subject):
        assert not subject.connected


async def test_where_the_endpoint_is_a_wildcard_the_engine_connects() -> None:
    async with following(EventSource(0, "tcp://127.0.0.1:*")) as (log, subject):
        assert subject._sockets is not None
        bound = f"tcp://127.0.0.1:{subject._sockets._subscriber.port}"
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
            engine.connect(bound)
            await engine.recv_multipart()  # the subscription
            await engine.send_multipart([b"kv", bytes(8), b"payload"])
            await until(lambda: log.said == ["lost track", b"payload"])


async def test_two_engines_at_one_port_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with following(EventSource(0, "tcp://127.0.0.1:*")) as (log, subject), AsyncExitStack() as engines:
        assert subject._sockets is not None
        context = engines.enter_context(zmq.asyncio.Context())
        sockets = [engines.enter_context(context.socket(zmq.PUB)) for _ in range(2)]
        for each in sockets:
            each.linger = 0
            each.connect(f"tcp://127.0.0.1:{subject._sockets._subscriber.port}")
        await until(lambda: subject.counts.connections == 2)
        for sent in range(3 * 2):
            said = len(log.said)
            while len(log.said) == said:  # the subscription may still be on its way
                await sockets[sent % 2].send_multipart([b"", bytes(8), str(sent).encode()])
                await asyncio.sleep(0.001)
        assert log.said.count("new epoch") >= 4
    told = [record.getMessage() for record in caplog.records]
    assert told.count(TWO_ENGINES) == 1
    assert sum("A new connection" in each for each in told) == 1, "that of the second engine"


async def test_a_port_that_another_publisher_has_is_listened_on_once_that_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        log = Log()
        subject = ZmqSource(EventSource(0, f"tcp://*:{port}"), log, restart_delay=0)
        subject.start()
        await asyncio.sleep(0)  # it tries again, in vain
        await asyncio.sleep(0)
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
        engine.connect(f"tcp://127.0.0.1:{port}")
        await engine.recv_multipart()  # the subscription
        await engine.send_multipart([b"kv", bytes(8), b"payload"])
        await until(lambda: log.said == ["lost track", b"payload"])
    await subject.close()
    assert caplog.text.count("Events cannot be followed yet") == 1


async def test_an_engine_that_comes_before_the_last_one_is_known_to_be_gone_is_followed() -> None:
    """Of a host that vanished without a word that takes a minute."""
    async with following(EventSource(0, "tcp://127.0.0.1:*")) as (log, subject):
        assert subject._sockets is not None
        bound = f"tcp://127.0.0.1:{subject._sockets._subscriber.port}"
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
            with context.socket(zmq.XPUB) as gone:
                gone.connect(bound)
                await gone.recv_multipart()
                engine.connect(bound)
                await engine.recv_multipart()
            await until(lambda: len(subject._sockets._subscriber.connections) == 1)  # type: ignore[union-attr]
            await engine.send_multipart([b"kv", bytes(8), b"payload"])
            await until(lambda: b"payload" in log.said)
            assert subject.connected
            assert log.caught_up[-1]


@pytest.fixture
def many_files() -> Iterator[None]:
    """As a router takes them at its start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_process_follows_a_large_fleet() -> None:
    source = EventSource(0, "ipc:///tmp/nobody-is-here", "ipc:///tmp/nobody-is-here")
    sources = [ZmqSource(source, Log()) for _ in range(350)]
    for each in sources:
        each.start()
    for each in sources:
        await each.close()


async def test_closing_at_any_time_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    async with FakeEngine(deaf=True) as engine:
        never_started = ZmqSource(engine.source, Log())
        await never_started.close()
        async with following(engine.source):
            pass
        async with following(engine.source):
            await until(lambda: engine.replays_asked)  # closed while a replay is under way
    assert asyncio.all_tasks() == before


async def test_an_engine_that_restarts_while_it_is_asked_leaves_no_connection_behind() -> None:
    before = asyncio.all_tasks()
    async with FakeEngine(deaf=True) as engine, following(engine.source) as (_, subject):
        await until(lambda: subject.counts.replays == 1)
        await engine.restart()
        await until(lambda: subject.counts.replays == 2)
    assert asyncio.all_tasks() == before
