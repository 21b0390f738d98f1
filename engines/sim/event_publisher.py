"""A rank's ZMQ sockets: events on a PUB, replay of past batches on a ROUTER, framed as vLLM and SGLang do.

PUB: `[topic, seq as u64 big-endian, payload]`, seq from 0. Replay: a DEALER sends `["", seq]` and gets
`["", topic, seq, payload]` for each kept batch from there on, then one with seq −1 and an empty payload.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

import zmq
import zmq.asyncio

from engines.sim.flavour import BUFFER_STEPS, HIGH_WATER_MARK

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """One rank's stream; its sockets are bound by `bind_publishers`."""

    def __init__(self, publisher: zmq.Socket[bytes], replay: zmq.asyncio.Socket, topic: bytes) -> None:
        self._publisher = publisher
        self._replay = replay
        self._topic = topic
        self._next_seq = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._replies = asyncio.create_task(self._serve_replay())

    def publish(self, payload: bytes) -> None:
        """Never blocks: a PUB socket drops what a subscriber is too slow for."""
        seq = self._next_seq
        self._next_seq += 1
        self._kept.append((seq, payload))
        self._publisher.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        self._replies.cancel()
        await asyncio.wait([self._replies])
        self._publisher.close(linger=0)
        self._replay.close(linger=0)

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                await self._answer(frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, peer: bytes, start: int) -> None:
        skip = min(len(self._kept), max(0, start - self._kept[0][0])) if self._kept else 0
        for seq, payload in list(islice(self._kept, skip, None)):
            await self._replay.send_multipart([peer, b"", self._topic, seq.to_bytes(8, "big"), payload])
        await self._replay.send_multipart([peer, b"", self._topic, END_OF_REPLAY, b""])


def bind_publishers(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, count: int, topic: str
) -> tuple[list[EventPublisher], int, int]:
    """Publishers of `count` ranks on consecutive ports, their replay sockets on consecutive ports too.

    `port` 0 finds free ones; else replay follows events. Returns them with both first ports. Raises zmq.ZMQError.
    """
    sockets, first = _bind_run(context, zmq.PUB, host, port, count)
    try:
        replays, first_replay = _bind_run(context, zmq.ROUTER, host, port and port + count, count)
    except zmq.ZMQError:
        _close(sockets)
        raise
    publishers = [
        EventPublisher(socket, zmq.asyncio.Socket.from_socket(replay), topic.encode())
        for socket, replay in zip(sockets, replays, strict=True)
    ]
    return publishers, first, first_replay


def _bind_run(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, count: int
) -> tuple[list[zmq.Socket[bytes]], int]:
    """`count` sockets on consecutive ports. A free port, for `port` 0, may have a taken one behind it: then another."""
    for attempt in range(50, -1, -1):
        sockets = [context.socket(kind) for _ in range(count)]
        try:
            return sockets, _bind_consecutive(sockets, host, port)
        except zmq.ZMQError:
            _close(sockets)
            if port or not attempt:
                raise
    raise AssertionError("unreachable")


def _bind_consecutive(sockets: list[zmq.Socket[bytes]], host: str, port: int) -> int:
    for socket in sockets:
        socket.set_hwm(HIGH_WATER_MARK)
        socket.ipv6 = "[" in host
    if port:
        sockets[0].bind(f"tcp://{host}:{port}")
    else:
        port = sockets[0].bind_to_random_port(f"tcp://{host}")
    for offset, socket in enumerate(sockets[1:], 1):
        socket.bind(f"tcp://{host}:{port + offset}")
    return port


def _close(sockets: list[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close(linger=0)
