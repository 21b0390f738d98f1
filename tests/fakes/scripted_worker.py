"""An engine that does what a test tells it to, over a real socket on a free port of 127.0.0.1.

Each request that the router relays takes the next script, an async function of its `Dialogue`; what a router asks on
its own account (/health, /v1/models, /tokenize, ...) is answered as vLLM would, unless a page says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from tests.fakes.reserved_port import ReservedPort

BLOCK_SIZE = 4
HIGH_WATER = 64 * 1024
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Received:
    """One request, as its bytes came."""

    head: bytes
    body: bytes
    connection: int
    """Number of the connection, in the order accepted."""

    @property
    def method(self) -> bytes:
        return self.head.split(b" ", 2)[0]

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Dialogue:
    """One request and the means to answer it."""

    def __init__(self, request: Received, connection: _Connection, go_on: asyncio.Event) -> None:
        self.request = request
        self.gone = connection.gone
        """Set when the router closed the connection, or the script did."""
        self.go_on = go_on
        """Set by the test, for scripts that wait for it."""
        self.finished = False
        """The script came to its end."""
        self._connection = connection

    @property
    def is_over(self) -> bool:
        return self.gone.is_set()

    @property
    def sent(self) -> int:
        """Bytes that left for the router's side."""
        connection = self._connection
        return connection.written - connection.transport.get_write_buffer_size()

    def send(self, data: bytes) -> None:
        if not self.is_over:
            self._connection.written += len(data)
            self._connection.transport.write(data)

    def send_at_once(self, data: bytes) -> None:
        """Without the event loop, which would do it later."""
        self._connection.written += len(data)
        assert os.write(self._connection.transport.get_extra_info("socket").fileno(), data) == len(data)

    def head(self, status: int = 200, *headers: bytes, length: int | None = None) -> None:
        """`length` None: a chunked body."""
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self.send(b"\r\n".join([b"HTTP/1.1 %d Whatever" % status, framing, *headers, b"", b""]))

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def events_head(self) -> None:
        self.head(200, b"content-type: text/event-stream; charset=utf-8")

    def event(self, data: bytes) -> None:
        self.chunk(b"data: " + data + b"\n\n")

    def end(self) -> None:
        """The last chunk."""
        self.send(b"0\r\n\r\n")

    def drop(self) -> None:
        """Close, when what was sent is out."""
        self._connection.transport.close()

    def reset(self) -> None:
        self._connection.reset()

    async def room(self) -> None:
        """Wait until the socket takes more."""
        await self._connection.writable.wait()


Script = Callable[[Dialogue], Awaitable[None]]


@dataclass
class Pages:
    """What the worker says of itself; `statuses` overrides the status of a path, None holds the answer back."""

    models: list[str] = field(default_factory=lambda: ["tiny"])
    max_model_len: int = 4096
    adapters: list[str] = field(default_factory=list)
    """Of the first model."""
    server_info: dict[str, Any] | None = None
    """SGLang's; None: the worker speaks like vLLM."""
    statuses: dict[str, int | None] = field(default_factory=dict)
    version: dict[str, str] = field(default_factory=lambda: {"version": "0.32.0"})
    ranks: tuple[int, ...] = (0,)
    """Of vLLM's data-parallel engine, those of this server."""

    def answer(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        """None: a path that only the router's clients ask for."""
        pages: dict[str, Callable[[], Any]] = {
            "/health": lambda: "",
            "/version": lambda: self.version,
            "/v1/models": self._models,
            "/tokenize": lambda: self._tokenize(body),
            "/metrics": lambda: "".join(
                f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",engine="{rank}",num_gpu_blocks="10000"}} 1\n'
                for rank in self.ranks
            ),
            "/kv_event_sources": dict,
            "/is_sleeping": lambda: {"is_sleeping": False},
            **({} if self.server_info is None else self._of_sglang()),
        }
        if path not in pages:
            return None
        content = pages[path]()
        return self.statuses.get(path) or 200, (content if isinstance(content, str) else json.dumps(content)).encode()

    def _models(self) -> Any:
        owner = "vllm" if self.server_info is None else "sglang"
        entries = [
            {"id": name, "object": "model", "owned_by": owner, "root": name, "max_model_len": self.max_model_len}
            for name in self.models
        ]
        entries += [{"id": name, "owned_by": owner, "parent": self.models[0]} for name in self.adapters]
        return {"object": "list", "data": entries}

    def _of_sglang(self) -> dict[str, Callable[[], Any]]:
        return {"/server_info": lambda: self.server_info, "/model_info": dict, "/v1/loads": dict, "/get_load": dict}

    def _tokenize(self, body: bytes) -> Any:
        """One token per character of the prompt."""
        asked = json.loads(body)
        text = asked.get("prompt") or "".join(message["content"] for message in asked.get("messages", []))
        tokens = [ord(letter) for letter in text]
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.max_model_len}


class ScriptedWorker:
    """`async with ScriptedWorker() as worker`. Down and up again with `refuse` and `listen`."""

    def __init__(self, name: str = "a", pages: Pages | None = None, default: Script | None = None) -> None:
        self.name = name
        self.pages = pages or Pages()
        self._port: ReservedPort | None = None
        self.port = 0
        self.requests: list[Received] = []
        self.dialogues: list[Dialogue] = []
        self.asked: list[str] = []
        """Paths that the router asked for itself."""
        self.probes: list[Received] = []
        """The requests for these."""
        self.accepted = 0
        self.reset_next = 0
        """Connections to reset as soon as they are accepted."""
        self.reads = True
        """False: nothing more is read from connections accepted from now on."""
        self.go_on = asyncio.Event()
        """Tells the scripts that wait for it to go on."""
        self.held = asyncio.Event()
        """Set when a page's answer is held back."""
        self.connections: set[_Connection] = set()
        self._scripts: deque[Script] = deque()
        self._default = default or answer()
        self._server: asyncio.Server | None = None
        self._clog: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedWorker:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._port:
            self._port.close()

    def then(self, *scripts: Script) -> None:
        """The next requests' scripts, in this order; after them the default's turn."""
        self._scripts.extend(scripts)

    def behave(self) -> None:
        """The default's turn from now on, on every page too."""
        self._scripts.clear()
        self.pages.statuses.clear()

    async def listen(self) -> None:
        """On a free port the first time, on the same one after."""
        if self._port is None:
            self._port = ReservedPort()
            self.port = self._port.number
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """Close the port and every connection: what comes next is refused."""
        for stopper in self._clog:
            stopper.close()
        self._clog.clear()
        if self._server:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.reset()
            await connection.gone.wait()

    async def die(self, dialogue: Dialogue) -> None:
        """A request's script: the engine dies of it."""
        await self.refuse()

    async def clog(self) -> None:
        """Neither accept nor refuse: connecting takes for ever, as the queue of connections to accept is full."""
        await self.refuse()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", self.port))
        deaf.listen(0)
        self._clog.append(deaf)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect(("127.0.0.1", self.port))
            self._clog.append(filler)

    def serve(self, request: Received, connection: _Connection) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        page = self.pages.answer(path, request.body)
        if page and path in self.pages.statuses and self.pages.statuses[path] is None:
            self.held.set()
            return
        if page:
            self.asked.append(path)
            self.probes.append(request)
            status, body = page
            connection.transport.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
            return
        dialogue = Dialogue(request, connection, self.go_on)
        self.requests.append(request)
        self.dialogues.append(dialogue)
        script = self._scripts.popleft() if self._scripts else self._default
        task = asyncio.ensure_future(_play(script, dialogue))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()


async def _play(script: Script, dialogue: Dialogue) -> None:
    await script(dialogue)
    dialogue.finished = True


class _Connection(asyncio.Protocol):
    def __init__(self, worker: ScriptedWorker) -> None:
        self.gone = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.transport: asyncio.Transport
        self.written = 0
        self._worker = worker
        self._buffer = b""
        self._number = worker.accepted
        worker.accepted += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(HIGH_WATER)
        self._worker.connections.add(self)
        if self._worker.reset_next:
            self._worker.reset_next -= 1
            self.reset()
        elif not self._worker.reads:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while request := self._take_request():
            self._worker.serve(request, self)

    def _take_request(self) -> Received | None:
        head, end, rest = self._buffer.partition(_END_OF_HEAD)
        if not end:
            return None
        request = Received(head + end, b"", self._number)
        length = int((request.values(b"content-length") or [b"0"])[0])
        if len(rest) < length:
            return None
        self._buffer = rest[length:]
        return Received(request.head, rest[:length], self._number)

    def reset(self) -> None:
        """Close so that the other side gets a reset."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        self.writable.set()
        self.gone.set()


# -- scripts


def answer(body: bytes = b'{"ok":true}', status: int = 200, *headers: bytes) -> Script:
    """Whole, with its length."""

    async def script(dialogue: Dialogue) -> None:
        dialogue.head(status, b"content-type: application/json", *headers, length=len(body))
        dialogue.send(body)

    return script


def says(*pieces: bytes, then: Callable[[Dialogue], None] | None = None) -> Script:
    """Bytes as they are, each piece in a write of its own."""

    async def script(dialogue: Dialogue) -> None:
        for piece in pieces:
            dialogue.send(piece)
            await asyncio.sleep(0)
        if then:
            then(dialogue)

    return script


def events(*data: bytes) -> Script:
    """A whole stream of server-sent events, one per chunk."""

    async def script(dialogue: Dialogue) -> None:
        dialogue.events_head()
        for each in data:
            dialogue.event(each)
        dialogue.end()

    return script


async def held_stream(dialogue: Dialogue) -> None:
    """One event, and the end when the test says so."""
    dialogue.events_head()
    dialogue.event(b"1")
    await dialogue.go_on.wait()
    dialogue.event(b"[DONE]")
    dialogue.end()


async def drop(dialogue: Dialogue) -> None:
    """Close before the first byte."""
    dialogue.drop()


async def reset(dialogue: Dialogue) -> None:
    dialogue.reset()


async def never(dialogue: Dialogue) -> None:
    """No answer, until the router goes away."""
    await dialogue.gone.wait()


def flood(size: int, piece: bytes = b"x" * 65536) -> Script:
    """`size` bytes with their length, as fast as they are taken."""

    async def script(dialogue: Dialogue) -> None:
        dialogue.head(200, b"content-type: application/octet-stream", length=size)
        left = size
        while left and not dialogue.is_over:
            dialogue.send(piece[:left])
            left -= min(left, len(piece))
            await dialogue.room()
            await asyncio.sleep(0)  # the other side shares this loop

    return script
