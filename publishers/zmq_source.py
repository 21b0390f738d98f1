"""One engine rank's ZMQ sockets: its messages and lost connections in, replays asked for.

One task takes what has happened, in the order in which it did.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import NamedTuple, Protocol

from engines.description import EventSource
from publishers.counts import SourceCounts
from publishers.logs import log_event
from publishers.zmq_sequence import (
    Apply,
    AskReplay,
    Connected,
    Disconnected,
    Live,
    LoseTrack,
    NewEpoch,
    Replayed,
    ReplayEnded,
    Stimulus,
    Unanswered,
    ZmqSequence,
)
from publishers.zmtp import message, subscription
from publishers.zmtp_socket import Connection, Heard, ZmtpSocket

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT = 5.0
"""Seconds without any answer after which a replay counts as unanswered."""

CONNECT_PATIENCE = 10.0
"""Seconds for the first connection to come about, after which that it has not is said."""

MOST_WAITING = 10_000
"""Messages that wait to be taken; while there are more nothing is read, and the engine keeps what it can for us."""

MOST_BYTES = 64 * 1024**2
"""Of one message, some ten thousand times what an engine sends. A larger one ends the connection for good, as it does
with libzmq."""

TURN = 64
"""Messages taken before others on the event loop get their turn."""

_UNKNOWN = "what it held before now, and what gets lost, stays unknown until it clears its cache"
NO_REPLAY = f"The engine offers no replay of its events: {_UNKNOWN}"
NOBODY_TO_ASK = f"No replay of the engine's events can be asked for: {_UNKNOWN}"
NOBODY_THERE = "No KV events can be had of the engine yet: nothing that speaks ZMQ is connected here"
UNEXPECTED = "A message is not what the protocol says; further ones are only counted"

_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES


class _Answer(NamedTuple):
    """To the replay of this number."""

    replay: int
    stimulus: Stimulus


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
            await self._sockets.close()
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
            for happened in await sockets.turn():
                if not isinstance(happened, _Answer):
                    await self._feed(happened, sockets)
                elif happened.replay == sockets.replay:  # one that was given up is no answer to the next
                    await self._feed(happened.stimulus, sockets)
            caught_up = sockets.connected and self._sequence.caught_up
            if caught_up != self._caught_up:
                self._caught_up = caught_up
                await self._sink.follow(caught_up)

    async def _feed(self, stimulus: Stimulus, sockets: _Sockets) -> None:
        nobody_to_ask = False
        for instruction in self._sequence.handle(stimulus):
            if isinstance(instruction, Apply):  # nearly all: one call less for each of them
                await self._apply(instruction.payload)
            elif isinstance(instruction, AskReplay):
                nobody_to_ask = not sockets.ask_replay(instruction.start)
            else:
                await self._report(instruction)
        if nobody_to_ask:
            await self._feed(ReplayEnded(complete=False), sockets)

    async def _report(self, instruction: NewEpoch | LoseTrack) -> None:
        if isinstance(instruction, NewEpoch):
            log_event(logger, logging.INFO, "A new connection: starting over", endpoint=self._source.endpoint)
            await self._sink.new_epoch()
            return
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
    """SUB, and while a replay is under way a DEALER."""

    def __init__(self, source: EventSource, replay_timeout: float, counts: SourceCounts) -> None:
        self.connected = False
        self.replay = 0
        """The number of the last one that was asked for."""
        self._source = source
        self._replay_timeout = replay_timeout
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._happened: deque[Stimulus | _Answer] = deque()
        self._paused = False
        self._dealer: ZmtpSocket | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._told = False
        self._closed: list[ZmtpSocket] = []
        """Of late."""
        heard = Heard(self._on_connection, self._on_message, self._on_loss, self._malformed)
        endpoint = source.endpoint
        self._subscriber = ZmtpSocket("SUB", endpoint, heard, MOST_BYTES, listen="*" in endpoint)

    async def turn(self) -> list[Stimulus | _Answer]:
        """Waits for the next things to happen and returns them in order."""
        happened = self._happened
        if happened:
            await asyncio.sleep(0)  # others have their turn too
        else:
            self._resume()
            self._waiter = self._loop.create_future()
            await self._waiter
        return [happened.popleft() for _ in range(min(TURN, len(happened)))]

    async def close(self) -> None:
        self._end_replay()
        self._close(self._subscriber)
        await asyncio.gather(*(each.task for each in self._closed), return_exceptions=True)

    def _close(self, socket: ZmtpSocket) -> None:
        socket.close()
        self._closed = [each for each in self._closed if not each.task.done()]
        self._closed.append(socket)

    def _note(self, happened: Stimulus | _Answer) -> None:
        self._happened.append(happened)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if len(self._happened) > MOST_WAITING and not self._paused:
            self._paused = True
            self._subscriber.pause()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._subscriber.resume()

    # -- what is live

    def _on_connection(self, connection: Connection) -> None:
        connection.send(subscription(self._source.topic.encode()))
        self.connected = True
        self._counts.connections += 1
        self._note(Connected())

    def _on_loss(self) -> None:
        self.connected = False
        self._note(Disconnected())
        log_event(logger, logging.WARNING, "The connection to the engine is lost", endpoint=self._source.endpoint)

    def _on_message(self, frames: list[bytes]) -> None:
        self._counts.messages += 1
        if len(frames) != 3:
            self._malformed("wrong number of frames")
        elif len(frames[1]) != _SEQ_BYTES or frames[1] == _END:
            self._malformed("no sequence number")
        else:
            self._note(Live(int.from_bytes(frames[1], "big"), frames[2]))

    def _malformed(self, what: str) -> None:
        self._counts.malformed[what] += 1
        if self._counts.malformed[what] == 1:
            log_event(logger, logging.WARNING, UNEXPECTED, endpoint=self._source.endpoint, what=what)

    # -- replays

    def ask_replay(self, start: int) -> bool:
        """Ends a replay under way and begins another; False where the engine offers none, or cannot be asked."""
        self._end_replay()
        if self._source.replay is None:
            return False
        self._counts.replays += 1
        self.replay += 1
        number = self.replay
        heard = Heard(partial(_ask, start), partial(self._on_answer, number), _nothing, self._malformed)
        try:
            # A `*` is nothing to connect to, and who listens here waits for ever: an engine does not come to be asked.
            self._dealer = ZmtpSocket("DEALER", self._source.replay, heard, MOST_BYTES)
        except ValueError as error:
            self._tell_once(error)
            return False
        self._extend_deadline()
        return True

    def _tell_once(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            log_event(logger, logging.ERROR, NOBODY_TO_ASK, endpoint=self._source.endpoint, error=error)

    def _on_answer(self, replay: int, frames: list[bytes]) -> None:
        self._extend_deadline()
        # [b"", topic, seq, payload], in older versions without the topic.
        if len(frames) not in (3, 4) or len(frames[-2]) != _SEQ_BYTES:
            self._malformed("wrong replay frames")
        elif frames[-2] == _END:
            self._end_replay()
            self._note(_Answer(replay, ReplayEnded(complete=True)))
        else:
            self._counts.replayed += 1
            self._note(_Answer(replay, Replayed(int.from_bytes(frames[-2], "big"), frames[-1])))

    def _extend_deadline(self) -> None:
        self._forget_deadline()
        self._deadline = self._loop.call_later(self._replay_timeout, self._on_deadline)

    def _on_deadline(self) -> None:
        self._end_replay()
        self._note(_Answer(self.replay, Unanswered()))

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_replay(self) -> None:
        self._forget_deadline()
        if self._dealer is not None:
            self._close(self._dealer)
            self._dealer = None


def _ask(start: int, connection: Connection) -> None:
    """Anew where the connection was lost: what comes twice counts once."""
    connection.send(message([b"", start.to_bytes(_SEQ_BYTES, "big")]))


def _nothing() -> None:
    """What is done where a replay's connection is lost: there will be another."""
