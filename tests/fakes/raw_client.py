"""A client whose bytes a test decides, and that shows the bytes of each answer as they came."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any

PATIENCE = 30.0
"""Seconds for any one thing to arrive: only what never comes takes as long."""


@dataclass(frozen=True)
class Answered:
    head: bytes
    raw: bytes
    """The body, framing included."""
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


def post(path: str = "/v1/completions", body: bytes = b'{"prompt":"hello"}', *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: router", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def get(path: str, *headers: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path.encode() + b" HTTP/1.1", b"host: router", *headers, b"", b""])


class RawClient:
    """`async with RawClient(port) as client`."""

    def __init__(
        self, port: int, receive_buffer: int | None = None, limit: int = 2**16, patience: float = PATIENCE
    ) -> None:
        """A small `receive_buffer` and `limit` make a client that cannot take much at a time. `patience`: seconds for
        any one thing to arrive."""
        self._port = port
        self._receive_buffer = receive_buffer
        self._limit = limit
        self._patience = patience
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> RawClient:
        sock = socket.socket()
        sock.setblocking(False)
        if self._receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except OSError:
            sock.close()
            raise
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=self._limit)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.vanish()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def vanish(self) -> None:
        """Gone, with a reset."""
        sock = self._writer.get_extra_info("socket")
        if not self._writer.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def leave(self) -> None:
        """Gone as programs go that end."""
        self._writer.close()

    async def ask(self, request: bytes) -> Answered:
        self.send(request)
        return await self.answer(head_only=request.startswith(b"HEAD"))

    async def read_until(self, end: bytes) -> bytes:
        async with asyncio.timeout(self._patience):
            return await self._reader.readuntil(end)

    async def read_exactly(self, size: int) -> bytes:
        async with asyncio.timeout(self._patience):
            return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """All that comes until the router closes; ConnectionResetError when it is cut."""
        async with asyncio.timeout(self._patience):
            return await self._reader.read()

    async def head(self) -> Answered:
        return Answered(await self.read_until(b"\r\n\r\n"), b"", b"")

    async def answer(self, head_only: bool = False) -> Answered:
        """A whole answer, framed by its head; IncompleteReadError when it ends before its end."""
        head = await self.head()
        if head_only or head.status in {204, 304}:
            return head
        if head.header(b"transfer-encoding") == b"chunked":
            raw, body = await self._chunked()
            return Answered(head.head, raw, body)
        length = head.header(b"content-length")
        raw = await (self.rest() if length is None else self.read_exactly(int(length)))
        return Answered(head.head, raw, raw)

    async def chunk(self) -> tuple[bytes, bytes]:
        """(as it came, content)"""
        line = await self.read_until(b"\r\n")
        rest = await self.read_exactly(int(line.partition(b";")[0], 16) + 2)
        return line + rest, rest[:-2]

    async def _chunked(self) -> tuple[bytes, bytes]:
        raw, body = b"", b""
        while True:
            piece, content = await self.chunk()
            raw, body = raw + piece, body + content
            if not content:
                return raw, body


def error_of(event: bytes) -> Any:
    """What the event says that ends a broken stream. Where the events before have no names, its name comes last."""
    assert (event[:6], event[-15:]) == (b"data: ", b"\nevent: error\n\n")
    return json.loads(event[6:-15])["error"]
