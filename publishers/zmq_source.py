"""The ZMQ sockets of one engine rank: receives its messages, notices lost connections, and asks for replays.

Messages are handled synchronously where they are read: nothing in handling one may wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from engines.description import EventSource
from publishers.counts import SourceCounts
from publishers.ending import end_tasks
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
"""Seconds for the first connection to be made, after which a warning is logged."""

RESTART_DELAY = 5.0
"""Seconds from an unexpected failure until a new connection is made, or the port that we listen on is tried again."""

MOST_BYTES = 64 * 1024**2
"""The largest message accepted, some ten thousand times what an engine sends. A larger one ends the connection."""

_UNKNOWN = "what it held before now, and what gets lost, stays unknown until it clears its cache"
NO_REPLAY = f"The engine offers no replay of its events: {_UNKNOWN}"
NOBODY_TO_ASK = f"No replay of the engine's events can be asked for: {_UNKNOWN}"
TOO_SHORT = (
    "Events of the engine are lost for good: its replay does not go back far enough (buffer_steps in its "
    "--kv-events-config); what they told stays unknown until it clears its cache"
)
UNANSWERED = f"The replay of the engine's events does not answer; check that it can be reached: {_UNKNOWN}"
NOBODY_THERE = "No KV events can be had of the engine yet: nothing that speaks ZMQ is connected here"
NO_PORT = "Events cannot be followed yet: the port where they should come is tried again until it can be had"
TWO_ENGINES = (
    "Two engines send their events to one port, and what is known of one is forgotten with each message of the other: "
    "each needs a port and a publisher of its own"
)
NOT_FOLLOWED = "The events of %s are not followed any more, until that begins anew"
UNEXPECTED = "A message is not what the protocol says; further ones are only counted"

_SEQ_BYTES = 8
_END = b"\xff" * _SEQ_BYTES


_Take = Callable[[Stimulus, "_Sockets"], None]


class EventSink(Protocol):
    """What receives a source's events, in order; no method may take long."""

    def apply(self, payload: bytes, past: bool) -> None:
        """`past`: the engine said it before we followed it."""

    def new_epoch(self) -> None: ...

    def lose_track(self) -> None: ...

    def follow(self, caught_up: bool) -> None:
        """Says whether the sink now has, as far as is known, all that the engine has published."""


class ZmqSource:
    """Follows `source` and reports to `sink` from `start` until `close`.

    The engine listens and we connect; where the endpoint holds a `*`, we listen and the engine connects.
    """

    def __init__(
        self,
        source: EventSource,
        sink: EventSink,
        *,
        replay_timeout: float = REPLAY_TIMEOUT,
        connect_patience: float | None = CONNECT_PATIENCE,
        restart_delay: float = RESTART_DELAY,
    ) -> None:
        """`connect_patience`: see `CONNECT_PATIENCE`; None for no warning."""
        self.counts = SourceCounts()
        self._connect_patience = connect_patience
        self._missing: asyncio.TimerHandle | None = None
        self._restart_delay = restart_delay
        self._again: asyncio.TimerHandle | None = None
        self._told = False
        """Of a port that cannot be listened on."""
        self._told_of_two = False
        self._source = source
        self._sink = sink
        self._replay_timeout = replay_timeout
        self._sequence = ZmqSequence()
        self._sockets: _Sockets | None = None
        self._caught_up = False
        self._from_start = False
        """Whether the latest replay asked for all that the engine still has, and not for what was missed."""

    @property
    def connected(self) -> bool:
        return self._sockets is not None and self._sockets.connected

    def start(self) -> None:
        """Raises ValueError for what is no ZMQ address. One that cannot be listened on is tried again."""
        if self._source.replay is None:
            log_event(logger, logging.WARNING, NO_REPLAY, endpoint=self._source.endpoint)
        self._connect()
        if self._connect_patience is not None:
            self._missing = asyncio.get_running_loop().call_later(self._connect_patience, self._miss)

    def _connect(self) -> None:
        try:
            self._sockets = _Sockets(self._source, self._replay_timeout, self.counts, self._take)
        except OSError as error:  # where we listen, another process has the port: the publisher before, which ends
            if not self._told:
                self._told = True
                log_event(logger, logging.ERROR, NO_PORT, error=error)
            self._connect_later()
        else:
            self._told = False

    def _miss(self) -> None:
        if not self.counts.connections:
            log_event(logger, logging.WARNING, NOBODY_THERE, endpoint=self._source.endpoint)

    async def close(self) -> None:
        for timer in (self._missing, self._again):
            if timer is not None:
                timer.cancel()
        if self._sockets is not None:
            await self._sockets.close()
            self._sockets = None

    def _take(self, stimulus: Stimulus, sockets: _Sockets) -> None:
        try:
            self._feed(stimulus, sockets)
            self._follow(sockets.connected and self._sequence.caught_up)
        except Exception:
            logger.exception(NOT_FOLLOWED, self._source.endpoint)
            sockets.end()
            self._connect_later()
            self._caught_up = False
            self._sink.follow(False)

    def _connect_later(self) -> None:
        """As after any lost connection a new epoch begins then, since events were missed."""
        self._again = asyncio.get_running_loop().call_later(self._restart_delay, self._connect)

    def _follow(self, caught_up: bool) -> None:
        if caught_up != self._caught_up:
            self._caught_up = caught_up
            self._sink.follow(caught_up)

    def _feed(self, stimulus: Stimulus, sockets: _Sockets) -> None:
        nobody_to_ask, past = False, self._from_start and isinstance(stimulus, Replayed)
        for instruction in self._sequence.handle(stimulus):
            if isinstance(instruction, Apply):  # the most frequent by far, so handled without a further call
                self._apply(instruction.payload, past)
            elif isinstance(instruction, AskReplay):
                self._from_start = not instruction.start
                nobody_to_ask = not sockets.ask_replay(instruction.start)
            elif isinstance(instruction, NewEpoch) and isinstance(stimulus, Live) and sockets.several:
                self._tell_of_two()
                self._sink.new_epoch()
            else:
                self._report(instruction, UNANSWERED if isinstance(stimulus, Unanswered) else TOO_SHORT)
        if nobody_to_ask:
            self._feed(ReplayEnded(complete=False), sockets)

    def _tell_of_two(self) -> None:
        """Once: there may be many messages a second."""
        if not self._told_of_two:
            self._told_of_two = True
            log_event(logger, logging.WARNING, TWO_ENGINES, endpoint=self._source.endpoint)

    def _report(self, instruction: NewEpoch | LoseTrack, why: str) -> None:
        if isinstance(instruction, NewEpoch):
            log_event(logger, logging.INFO, "A new connection: starting over", endpoint=self._source.endpoint)
            self._sink.new_epoch()
            return
        self.counts.lost_track += 1
        if (replay := self._source.replay) is not None:
            log_event(logger, logging.WARNING, why, endpoint=self._source.endpoint, replay=replay)
        self._sink.lose_track()

    def _apply(self, payload: bytes, past: bool) -> None:
        try:
            self._sink.apply(payload, past)
        except Exception:
            # One bad message must not end the stream; the sink has to know that it is missing.
            logger.exception("A message could not be applied")
            self._sink.lose_track()


class _Sockets:
    """A SUB socket, and during a replay a DEALER socket. What happens is passed to `take`, in order."""

    def __init__(self, source: EventSource, replay_timeout: float, counts: SourceCounts, take: _Take) -> None:
        self.connected = False
        self._source = source
        self._replay_timeout = replay_timeout
        self._counts = counts
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._dealer: ZmtpSocket | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._told = False
        self._closed: list[ZmtpSocket] = []
        """Sockets closed whose tasks may not have ended yet."""
        heard = Heard(self._on_connection, self._on_message, self._on_loss, self._malformed)
        endpoint = source.endpoint
        self._subscriber = ZmtpSocket("SUB", endpoint, heard, MOST_BYTES, listen="*" in endpoint)

    @property
    def several(self) -> bool:
        """Whether more than one engine is connected. Never where we connect."""
        return sum(each.agreed for each in self._subscriber.connections) > 1

    async def close(self) -> None:
        self.end()
        await end_tasks(each.task for each in self._closed)

    def end(self) -> None:
        self.connected = False
        self._end_replay()
        self._close(self._subscriber)

    def _close(self, socket: ZmtpSocket) -> None:
        socket.close()
        self._closed = [each for each in self._closed if not each.task.done()]
        self._closed.append(socket)

    # -- what is live

    def _on_connection(self, connection: Connection) -> None:
        connection.send(subscription(self._source.topic.encode()))
        self.connected = True
        self._counts.connections += 1
        self._take(Connected(), self)

    def _on_loss(self) -> None:
        # Where we listen, a restarted engine may connect before the loss of its old connection is noticed.
        self.connected = any(each.agreed for each in self._subscriber.connections)
        log_event(logger, logging.WARNING, "The connection to the engine is lost", endpoint=self._source.endpoint)
        self._take(Disconnected(), self)

    def _on_message(self, frames: list[bytes]) -> None:
        self._counts.messages += 1
        if len(frames) != 3:
            self._malformed("wrong number of frames")
        elif len(frames[1]) != _SEQ_BYTES or frames[1] == _END:
            self._malformed("no sequence number")
        else:
            self._take(Live(int.from_bytes(frames[1], "big"), frames[2]), self)

    def _malformed(self, what: str) -> None:
        self._counts.malformed[what] += 1
        if self._counts.malformed[what] == 1:
            log_event(logger, logging.WARNING, UNEXPECTED, endpoint=self._source.endpoint, what=what)

    # -- replays

    def ask_replay(self, start: int) -> bool:
        """Starts a replay, and ends one in progress. False where the engine offers none, or cannot be asked."""
        self._end_replay()
        if self._source.replay is None:
            return False
        self._counts.replays += 1
        heard = Heard(partial(_ask, start), self._on_answer, _nothing, self._malformed)
        try:
            # A `*` cannot be connected to, and listening is no use: engines do not connect for replays.
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

    def _on_answer(self, frames: list[bytes]) -> None:
        self._extend_deadline()
        # [b"", topic, seq, payload]; older versions leave out the topic.
        if len(frames) not in (3, 4) or len(frames[-2]) != _SEQ_BYTES:
            self._malformed("wrong replay frames")
        elif frames[-2] == _END:
            self._end_replay()
            self._take(ReplayEnded(complete=True), self)
        else:
            self._counts.replayed += 1
            self._take(Replayed(int.from_bytes(frames[-2], "big"), frames[-1]), self)

    def _extend_deadline(self) -> None:
        self._forget_deadline()
        self._deadline = self._loop.call_later(self._replay_timeout, self._on_deadline)

    def _on_deadline(self) -> None:
        self._end_replay()
        self._take(Unanswered(), self)

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
    """Asks, also again after a lost connection: events that come twice are applied once."""
    connection.send(message([b"", start.to_bytes(_SEQ_BYTES, "big")]))


def _nothing() -> None:
    """Nothing to do when a replay's connection is lost: the socket reconnects."""
