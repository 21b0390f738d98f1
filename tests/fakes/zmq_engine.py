"""The KV event side of an engine, scripted: what real publishers put on the wire, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engines.description import EventSource
from indexer.hashing import chain_hashes, pack_tokens
from tests.fakes.reserved_port import ReservedPort

BLOCK_SIZE = 4

Message = list[bytes]


def stored(first: int, *more: int, parent: int | None = None, medium: str = "GPU") -> dict[str, Any]:
    """One BlockStored of vLLM; block `i` holds BLOCK_SIZE times the token `i` and has the hash `i`."""
    hashes = [first, *more]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [token for token in hashes for _ in range(BLOCK_SIZE)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def ours(*blocks: int) -> set[int]:
    """Our hashes of a chain of these blocks."""
    return set(chain_hashes(pack_tokens([token for block in blocks for token in [block] * BLOCK_SIZE]), BLOCK_SIZE, 0))


CLEARED = {"type": "AllBlocksCleared"}


class FakeEngine:
    """Publishes and answers replays; `async with`. Ports are free ones and stay the same over a `restart`.

    `buffer` is how many messages are kept for replay. `topic_in_replay` False answers as older versions do. `deaf`
    takes replay requests and never answers.
    """

    def __init__(self, *, buffer: int = 1000, topic_in_replay: bool = True, deaf: bool = False) -> None:
        self.topic_in_replay = topic_in_replay
        self.deaf = deaf
        self.replays_asked: list[int] = []
        self.payloads: list[bytes] = []
        """Everything published by this process; the index is the sequence number."""
        self._buffer = buffer
        self._ports: list[ReservedPort] = []

    async def __aenter__(self) -> FakeEngine:
        self._ports = [ReservedPort(), ReservedPort()]
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()
        for port in self._ports:
            port.close()

    @property
    def _endpoints(self) -> list[str]:
        return [f"tcp://127.0.0.1:{port.number}" for port in self._ports]

    @property
    def source(self) -> EventSource:
        return EventSource(0, self._endpoints[0], self._endpoints[1], "kv@")

    @property
    def source_without_replay(self) -> EventSource:
        return EventSource(0, self._endpoints[0], None, "kv@")

    async def subscribed(self) -> None:
        """Somebody's subscription has arrived since the start or the last restart."""
        async with asyncio.timeout(60):
            await self._subscribed.wait()

    async def publish(self, *events: dict[str, Any]) -> None:
        await self.publish_raw(msgspec.msgpack.encode([1.0, list(events), None]))

    async def publish_raw(self, payload: bytes) -> None:
        """The next message with any payload."""
        await self.send([b"kv@w@m", len(self.payloads).to_bytes(8, "big"), payload])
        self.payloads.append(payload)

    async def lose(self, *events: dict[str, Any]) -> None:
        """Publishes a message that the network loses; it can be replayed."""
        self.payloads.append(msgspec.msgpack.encode([1.0, list(events), None]))

    async def send(self, frames: Sequence[bytes]) -> None:
        """Any frames at all."""
        await self._pub.send_multipart(list(frames))

    async def restart(self, *events: dict[str, Any]) -> None:
        """Another process on the same ports; it publishes `events`, one message each, before anyone can subscribe."""
        await self._close()
        self.payloads = [msgspec.msgpack.encode([2.0, [event], None]) for event in events]
        self._open()

    async def break_connection(self) -> None:
        """The same process goes on, but every connection is lost."""
        await self._close()
        self._open()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        # XPUB is PUB that tells of subscriptions, so that no test need guess when one has arrived.
        self._pub: zmq.asyncio.Socket = self._context.socket(zmq.XPUB)
        _bind(self._pub, self._endpoints[0])
        self._subscribed = asyncio.Event()
        self._subscriptions = asyncio.create_task(self._watch(), name="fake engine subscriptions")
        self._router = self._context.socket(zmq.ROUTER)
        _bind(self._router, self._endpoints[1])
        self._replays = asyncio.create_task(self._answer(), name="fake engine replays")

    async def _close(self) -> None:
        for task in (self._replays, self._subscriptions):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    async def _watch(self) -> None:
        while True:
            if (await self._pub.recv_multipart())[0].startswith(b"\x01"):
                self._subscribed.set()

    async def _answer(self) -> None:
        while True:
            client, empty, start_bytes = await self._router.recv_multipart()
            start = int.from_bytes(start_bytes, "big")
            self.replays_asked.append(start)
            if self.deaf:
                continue
            for seq, payload in deque(enumerate(self.payloads), maxlen=self._buffer):
                if seq >= start:
                    await self._router.send_multipart([client, empty, *self._frames(seq.to_bytes(8, "big"), payload)])
            await self._router.send_multipart([client, empty, *self._frames(b"\xff" * 8, b"")])

    def _frames(self, seq: bytes, payload: bytes) -> Message:
        topic = [b"kv@w@m"] if self.topic_in_replay else []
        return [*topic, seq, payload]


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    socket.linger = 0
    socket.bind(endpoint)
