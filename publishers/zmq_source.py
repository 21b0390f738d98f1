"""One engine rank's ZMQ sockets: its messages and lost connections in, replays asked for.

One task owns all sockets and reads them in turn, so what happens reaches the sequence in one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engines.description import EventSource
from publishers.logs import log_event
from publishers.zmq_sequence import (
    Apply,
    AskReplay,
    Connected,
    Instruction,
    Live,
    LoseTrack,
    NewEpoch,
    Replayed,
    ReplayEnded,
    Stimulus,
    ZmqSequence,
)

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT = 5.0
"""Seconds without any answer after which a replay counts as broken off."""

RECEIVE_LIMIT = 100_000
"""Messages that ZMQ keeps for us, as many as vLLM keeps on its side; those beyond show as a gap."""

TURN = 64
"""Messages read from one socket before the others get their turn."""

NO_REPLAY = (
    "The engine offers no replay of its events: what it held before now, and what gets lost, stays unknown until it "
    "clears its cache"
)
UNEXPECTED = "A message is not what the protocol says; further ones are only counted"

_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES


class EventSink(Protocol):
    """Where a source reports, in order; no method may wait long."""

    async def apply(self, payload: bytes) -> None: ...

    async def new_epoch(self) -> None: ...

    async def lose_track(self) -> None: ...


class SourceCounts(msgspec.Struct):
    """Totals since the source was made."""

    messages: int = 0
    connections: int = 0
    replays: int = 0
    replayed: int = 0
    lost_track: int = 0
    """Times that messages were missing for good."""
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    """Messages that are not what the protocol says, by what is wrong."""


class ZmqSource:
    """Follows `source` and reports to `sink`, from `start` until `close`.

    The engine listens and we connect; where the endpoint holds a `*`, we listen and the engine connects.
    """

    def __init__(self, source: EventSource, sink: EventSink, *, replay_timeout: float = REPLAY_TIMEOUT) -> None:
        self.counts = SourceCounts()
        self._source = source
        self._sink = sink
        self._replay_timeout = replay_timeout
        self._sequence = ZmqSequence()
        self._sockets: _Sockets | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._sockets is not None and self._sockets.connected

    def start(self) -> None:
        """Raises ValueError for an endpoint that is no ZMQ address, or that cannot be listened on."""
        if self._source.replay is None:
            log_event(logger, logging.WARNING, NO_REPLAY, endpoint=self._source.endpoint)
        self._sockets = _Sockets(self._source, self._replay_timeout, self.counts)
        self._task = asyncio.create_task(self._run(self._sockets), name=f"events of {self._source.endpoint}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._sockets is not None:
            self._sockets.close()
        self._task = self._sockets = None

    async def _run(self, sockets: _Sockets) -> None:
        while True:
            for stimulus in await sockets.turn():
                await self._feed(stimulus, sockets)

    async def _feed(self, stimulus: Stimulus, sockets: _Sockets) -> None:
        stimuli = deque([stimulus])
        while stimuli:
            for instruction in self._sequence.handle(stimuli.popleft()):
                if isinstance(instruction, AskReplay) and not await sockets.ask_replay(instruction.start):
                    stimuli.append(ReplayEnded(complete=False))
                else:
                    await self._report(instruction)

    async def _report(self, instruction: Instruction) -> None:
        match instruction:
            case Apply(payload):
                await self._apply(payload)
            case NewEpoch():
                log_event(logger, logging.INFO, "A new connection: starting over", endpoint=self._source.endpoint)
                await self._sink.new_epoch()
            case LoseTrack():
                self.counts.lost_track += 1
                if self._source.replay is not None:
                    log_event(logger, logging.WARNING, "Events are lost for good", endpoint=self._source.endpoint)
                await self._sink.lose_track()

    async def _apply(self, payload: bytes) -> None:
        try:
            await self._sink.apply(payload)
        except Exception:
            # One message must not end the stream; that it is missing is for the sink to know.
            logger.exception("A message could not be applied")
            await self._sink.lose_track()


class _Sockets:
    """SUB, its monitor, and while a replay is under way a DEALER."""

    def __init__(self, source: EventSource, replay_timeout: float, counts: SourceCounts) -> None:
        self.connected = False
        self._source = source
        self._replay_timeout = replay_timeout
        self._counts = counts
        self._poller = zmq.asyncio.Poller()
        self._dealer: zmq.asyncio.Socket | None = None
        self._deadline = 0.0
        self._subscriber = self._open(zmq.SUB)
        self._subscriber.subscribe(source.topic)
        self._monitor: zmq.asyncio.Socket = self._subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            _attach(self._subscriber, source.endpoint)
        except ValueError:
            self.close()
            raise

    async def turn(self) -> list[Stimulus]:
        """Waits for the next things to happen and returns them in order."""
        await self._poller.poll(self._until_deadline())
        # In this order: a connection is reported before it brings anything, so no message read here can be of one that
        # is not reported yet.
        messages = await _receive(self._subscriber)
        stimuli: list[Stimulus] = self._connections(await _receive(self._monitor))
        if stimuli and self._counts.connections > 1:
            # From before or after, nobody can tell. The replay that now begins has all that counts.
            while messages:
                messages = await _receive(self._subscriber)
        stimuli += self._live(messages)
        if self._dealer is not None:
            stimuli += self._answers(await _receive(self._dealer))
        return stimuli

    async def ask_replay(self, start: int) -> bool:
        """Ends a replay under way and begins another; False where the engine offers none."""
        self._end_replay()
        if self._source.replay is None:
            return False
        self._counts.replays += 1
        self._dealer = self._open(zmq.DEALER)
        try:
            _attach(self._dealer, self._source.replay)
        except ValueError as error:
            log_event(logger, logging.ERROR, "No replay can be asked for", error=error)
            self._end_replay()
            return False
        self._extend_deadline()
        await self._dealer.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")], zmq.NOBLOCK)
        return True

    def close(self) -> None:
        self._end_replay()
        self._subscriber.disable_monitor()
        self._monitor.close()
        self._subscriber.close()

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(kind)
        socket.linger = 0
        # An engine sends a replay as fast as it can, and drops what we do not take.
        socket.rcvhwm = 0 if kind == zmq.DEALER else RECEIVE_LIMIT
        # A host that vanished without a word is a lost connection too, after a minute.
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 30, 10
        socket.tcp_keepalive_cnt = 3
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _live(self, messages: list[list[bytes]]) -> list[Stimulus]:
        stimuli: list[Stimulus] = []
        for frames in messages:
            self._counts.messages += 1
            if len(frames) != 3:
                self._malformed("wrong number of frames")
            elif len(frames[1]) != _SEQ_BYTES or frames[1] == _END:
                self._malformed("no sequence number")
            else:
                stimuli.append(Live(int.from_bytes(frames[1], "big"), frames[2]))
        return stimuli

    def _connections(self, messages: list[list[bytes]]) -> list[Stimulus]:
        stimuli: list[Stimulus] = []
        for frames in messages:
            self.connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self._counts.connections += 1
                stimuli.append(Connected())
            else:
                log_event(
                    logger, logging.WARNING, "The connection to the engine is lost", endpoint=self._source.endpoint
                )
        return stimuli

    def _answers(self, messages: list[list[bytes]]) -> list[Stimulus]:
        stimuli: list[Stimulus] = []
        for frames in messages:
            self._extend_deadline()
            # [b"", topic, seq, payload], in older versions without the topic.
            if len(frames) not in (3, 4) or len(frames[-2]) != _SEQ_BYTES:
                self._malformed("wrong replay frames")
            elif frames[-2] == _END:
                self._end_replay()
                return [*stimuli, ReplayEnded(complete=True)]
            else:
                self._counts.replayed += 1
                stimuli.append(Replayed(int.from_bytes(frames[-2], "big"), frames[-1]))
        if self._until_deadline() == 0:
            self._end_replay()
            stimuli.append(ReplayEnded(complete=False))
        return stimuli

    def _malformed(self, what: str) -> None:
        self._counts.malformed[what] += 1
        if self._counts.malformed[what] == 1:
            log_event(logger, logging.WARNING, UNEXPECTED, endpoint=self._source.endpoint, what=what)

    def _extend_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._replay_timeout

    def _until_deadline(self) -> float | None:
        """Milliseconds; None while no replay is under way."""
        if self._dealer is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time()) * 1000

    def _end_replay(self) -> None:
        if self._dealer is not None:
            self._poller.unregister(self._dealer)
            self._dealer.close()
            self._dealer = None


def _attach(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    # Only for literal addresses: with it, a name's first address is the IPv6 one, where an engine may not listen.
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint) if "*" in endpoint else socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint!r} cannot be used for events: {error.strerror}") from None


async def _receive(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """What is there, at most TURN messages; waits for nothing."""
    messages: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(messages) < TURN:
            messages.append(await socket.recv_multipart(zmq.NOBLOCK))
    return messages
