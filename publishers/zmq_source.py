"""One engine rank's ZMQ sockets: its messages and lost connections in, replays asked for.

One task owns all sockets and reads them in turn, so what happens reaches the sequence in one order. The sockets are
plain ones beside the event loop: a message read through zmq.asyncio costs many times as much CPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import cache
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from engines.description import EventSource
from publishers.counts import SourceCounts
from publishers.logs import log_event
from publishers.zmq_sequence import (
    Apply,
    AskReplay,
    Connected,
    Disconnected,
    Instruction,
    Live,
    LoseTrack,
    NewEpoch,
    Replayed,
    ReplayEnded,
    Stimulus,
    Unanswered,
    ZmqSequence,
)

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT = 5.0
"""Seconds without any answer after which a replay counts as unanswered."""

CONNECT_PATIENCE = 10.0
"""Seconds for the first connection to come about, after which that it has not is said."""

MOST_SOCKETS = 65_535
"""As many as ZMQ can have; else it has 1023, and each rank takes three. Whoever runs out of them has a fleet of 341."""

RECEIVE_LIMIT = 100_000
"""Messages that ZMQ keeps for us, as many as vLLM keeps on its side; those beyond show as a gap."""

MOST_BYTES = 64 * 1024**2
"""Of one message, some ten thousand times what an engine sends. A larger one ends the connection for good: ZMQ does
not come back to who breaks its protocol."""

TURN = 64
"""Messages read from one socket before the others get their turn."""

_UNKNOWN = "what it held before now, and what gets lost, stays unknown until it clears its cache"
NO_REPLAY = f"The engine offers no replay of its events: {_UNKNOWN}"
NOBODY_TO_ASK = f"No replay of the engine's events can be asked for: {_UNKNOWN}"
NOBODY_THERE = "No KV events can be had of the engine yet: nothing that speaks ZMQ is connected here"
UNEXPECTED = "A message is not what the protocol says; further ones are only counted"

_Socket = zmq.Socket[bytes]
_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES

_EVENTS, _READABLE, _NO_WAIT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""Plain numbers: arithmetic on enums costs more than reading a message."""


class EventSink(Protocol):
    """Where a source reports, in order; no method may wait long."""

    async def apply(self, payload: bytes) -> None: ...

    async def new_epoch(self) -> None: ...

    async def lose_track(self) -> None: ...

    async def follow(self, caught_up: bool) -> None:
        """From now on the sink has all that the engine said, as far as anybody knows; or no longer."""


class ZmqSource:
    """Follows `source` and reports to `sink`, from `start` until `close`.

    The engine listens and we connect; where the endpoint holds a `*`, we listen and the engine connects.
    """

    def __init__(
        self,
        source: EventSource,
        sink: EventSink,
        *,
        replay_timeout: float = REPLAY_TIMEOUT,
        connect_patience: float = CONNECT_PATIENCE,
    ) -> None:
        self.counts = SourceCounts()
        self._connect_patience = connect_patience
        self._missing: asyncio.TimerHandle | None = None
        self._source = source
        self._sink = sink
        self._replay_timeout = replay_timeout
        self._sequence = ZmqSequence()
        self._sockets: _Sockets | None = None
        self._task: asyncio.Task[None] | None = None
        self._caught_up = False

    @property
    def connected(self) -> bool:
        return self._sockets is not None and self._sockets.connected

    def start(self) -> None:
        """Raises ValueError for an endpoint that is no ZMQ address, or that cannot be listened on."""
        if self._source.replay is None:
            log_event(logger, logging.WARNING, NO_REPLAY, endpoint=self._source.endpoint)
        self._sockets = _Sockets(self._source, self._replay_timeout, self.counts)
        self._task = asyncio.create_task(self._run(self._sockets), name=f"events of {self._source.endpoint}")
        self._missing = asyncio.get_running_loop().call_later(self._connect_patience, self._miss)

    def _miss(self) -> None:
        if not self.counts.connections:
            log_event(logger, logging.WARNING, NOBODY_THERE, endpoint=self._source.endpoint)

    async def close(self) -> None:
        if self._missing is not None:
            self._missing.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sockets is not None:
            self._sockets.close()
        self._task = self._sockets = None

    async def _run(self, sockets: _Sockets) -> None:
        try:
            await self._follow(sockets)
        except Exception:
            logger.exception("The events of %s are not followed any more", self._source.endpoint)
            sockets.connected = False
            await self._sink.follow(False)

    async def _follow(self, sockets: _Sockets) -> None:
        while True:
            for stimulus in await sockets.turn():
                await self._feed(stimulus, sockets)
            caught_up = sockets.connected and self._sequence.caught_up
            if caught_up != self._caught_up:
                self._caught_up = caught_up
                await self._sink.follow(caught_up)

    async def _feed(self, stimulus: Stimulus, sockets: _Sockets) -> None:
        stimuli = deque([stimulus])
        while stimuli:
            for instruction in self._sequence.handle(stimuli.popleft()):
                if isinstance(instruction, AskReplay):
                    if not sockets.ask_replay(instruction.start):
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
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[list[Stimulus]] | None = None
        self._dealer: _Socket | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._overdue = False
        self._told = False
        self._unsignalled = True
        """Something may be there that no signal will tell of: sockets signal once until they are read to their end."""
        self._subscriber = self._open(zmq.SUB)
        self._subscriber.subscribe(source.topic)
        self._monitor: _Socket = self._subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._watch(self._monitor)
        try:
            _attach(self._subscriber, source.endpoint, listen="*" in source.endpoint)
        except ValueError:
            self.close()
            raise

    async def turn(self) -> list[Stimulus]:
        """Waits for the next things to happen and returns them in order."""
        while self._unsignalled:
            stimuli = self._read()
            await asyncio.sleep(0)  # others have their turn too
            if stimuli:
                return stimuli
        self._waiter = self._loop.create_future()
        return await self._waiter

    def ask_replay(self, start: int) -> bool:
        """Ends a replay under way and begins another; False where the engine offers none, or cannot be asked."""
        self._end_replay()
        if self._source.replay is None:
            return False
        self._counts.replays += 1
        try:
            self._dealer = self._open(zmq.DEALER)
            # A `*` is nothing to connect to, and who listens here waits for ever: an engine does not come to be asked.
            _attach(self._dealer, self._source.replay, listen=False)
            self._dealer.send_multipart([b"", start.to_bytes(_SEQ_BYTES, "big")], zmq.NOBLOCK)
        except (ValueError, zmq.ZMQError) as error:
            self._end_replay()
            self._tell_once(error)
            return False
        self._extend_deadline()
        return True

    def _tell_once(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            log_event(logger, logging.ERROR, NOBODY_TO_ASK, endpoint=self._source.endpoint, error=error)

    def close(self) -> None:
        self._end_replay()
        self._subscriber.disable_monitor()
        self._close(self._monitor)
        self._close(self._subscriber)

    def _on_signal(self) -> None:
        """A socket has something, or had; or a replay's time is up."""
        if self._waiter is not None and not self._waiter.done():
            stimuli = self._read()
            if stimuli or self._unsignalled:
                self._waiter.set_result(stimuli)

    def _read(self) -> list[Stimulus]:
        """What has happened, in order; waits for nothing."""
        self._unsignalled = False
        # In this order: a connection is reported before it brings anything, so no message read here can be of one that
        # is not reported yet.
        messages = self._receive(self._subscriber)
        stimuli: list[Stimulus] = self._connections(self._receive(self._monitor))
        if self._counts.connections > 1 and any(isinstance(each, Connected) for each in stimuli):
            # From before or after, nobody can tell. The replay that now begins has all that counts.
            while messages:
                messages = self._receive(self._subscriber)
        stimuli += self._live(messages)
        if self._dealer is not None:
            stimuli += self._answers(self._receive(self._dealer))
        return stimuli

    def _receive(self, socket: _Socket) -> list[list[bytes]]:
        """What is there, at most TURN messages."""
        messages: list[list[bytes]] = []
        while int(socket.get(_EVENTS)) & _READABLE:
            if len(messages) == TURN:
                self._unsignalled = True
                break
            messages.append(socket.recv_multipart(_NO_WAIT))
        return messages

    def _open(self, kind: int) -> _Socket:
        socket: _Socket = _context().socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MOST_BYTES
        # An engine sends a replay as fast as it can, and drops what we do not take.
        socket.rcvhwm = 0 if kind == zmq.DEALER else RECEIVE_LIMIT
        # A host that vanished without a word is a lost connection too, after a minute.
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 30, 10
        socket.tcp_keepalive_cnt = 3
        self._watch(socket)
        return socket

    def _watch(self, socket: _Socket) -> None:
        self._unsignalled = True
        self._loop.add_reader(socket.fileno(), self._on_signal)

    def _close(self, socket: _Socket) -> None:
        self._loop.remove_reader(socket.fileno())
        socket.close()

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
            before = self.connected
            self.connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self._counts.connections += 1
                stimuli.append(Connected())
            elif before:  # else somebody who speaks no ZMQ has hung up, and does so with each attempt
                stimuli.append(Disconnected())
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
        if self._overdue:
            self._end_replay()
            stimuli.append(Unanswered())
        return stimuli

    def _malformed(self, what: str) -> None:
        self._counts.malformed[what] += 1
        if self._counts.malformed[what] == 1:
            log_event(logger, logging.WARNING, UNEXPECTED, endpoint=self._source.endpoint, what=what)

    def _extend_deadline(self) -> None:
        self._forget_deadline()
        self._deadline = self._loop.call_later(self._replay_timeout, self._on_deadline)

    def _on_deadline(self) -> None:
        self._overdue = True
        self._on_signal()

    def _forget_deadline(self) -> None:
        self._overdue = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_replay(self) -> None:
        self._forget_deadline()
        if self._dealer is not None:
            self._close(self._dealer)
            self._dealer = None


@cache
def _context() -> zmq.Context[_Socket]:
    """Our own, as the number of its sockets counts only before there is the first."""
    context: zmq.Context[_Socket] = zmq.Context()
    context.max_sockets = MOST_SOCKETS
    return context


def _attach(socket: _Socket, endpoint: str, *, listen: bool) -> None:
    # Only for literal addresses: with it, a name's first address is the IPv6 one, where an engine may not listen.
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint) if listen else socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint!r} cannot be used for events: {error.strerror}") from None
