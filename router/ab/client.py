"""The load generator's HTTP client: one connection per request; for each chunk it only reads the clock and counts.

The client runs on the same machine as the fleet and the router that it measures, so it must cost little. It parses only
the last few kilobytes of a stream, for the usage. All times are time.perf_counter() seconds.
"""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import cast

import httptools
import msgspec

from engines.answers import UNDECODABLE
from engines.endpoints import url_host
from publishers.urls import split_url
from router.security.worker_access import WorkerAccess

_TAIL_KEPT, _TAIL_CUT = 4096, 16_384
"""Bytes of the end of a stream that are kept, which hold its usage; and how many there are when it is cut to that."""
WORKER_HEADER, PREFILL_HEADER = b"x-router-worker", b"x-router-prefill-worker"


class Address(msgspec.Struct, frozen=True):
    """The address of a server, with an optional path before /v1, and how to connect."""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None
    """None for plain HTTP."""
    key: str | None = None

    @classmethod
    def parse(cls, url: str, access: WorkerAccess = WorkerAccess()) -> Address:  # noqa: B008 -- immutable
        """Parses a URL as the router writes it, or accepts it for `--worker`."""
        parts = split_url(url)
        secure = parts.scheme == "https"
        tls = (access.context or ssl.create_default_context()) if secure else None
        return cls(parts.hostname or "", parts.port or (443 if secure else 80), parts.path.rstrip("/"), tls, access.key)

    @property
    def url(self) -> str:
        """The URL, as the router writes it."""
        return f"{'https' if self.tls else 'http'}://{self._named}{self.path}"

    @property
    def _named(self) -> str:
        """Host and port as in a URL or a Host header."""
        return f"{url_host(self.host)}:{self.port}"

    def request(self, body: bytes) -> bytes:
        """The bytes of a POST /v1/completions, after which the connection is not used again."""
        shown = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {self.path}/v1/completions HTTP/1.1\r\nHost: {self._named}\r\n{shown}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class Outcome(msgspec.Struct):
    """The outcome of a request. `error` is empty on success; token counts are those of the engine's usage."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    status: int = 0
    chunks: int = 0
    size: int = 0
    worker: str = ""
    prefill_worker: str = ""
    """The worker that computed the prompt, if it was another."""
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _LastChunk(msgspec.Struct):
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Exchange(asyncio.Protocol):
    """A request and its streamed response. `done` is set when the response is complete or the connection is lost."""

    def __init__(self, request: bytes, sent: float, done: asyncio.Future[None]) -> None:
        self.outcome = Outcome(sent)
        self.done = done
        self._request = request
        self._tail = bytearray()
        self._now = sent
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish(f"not an HTTP response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends with its connection. Of an error even the beginning says more than that it broke.
        if b"[DONE]" in self._tail or self.outcome.status not in {0, 200}:
            self.on_message_complete()
        else:
            self._finish(
                f"connection closed after {self.outcome.size} bytes of the response" + (f": {exc}" if exc else "")
            )

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == WORKER_HEADER:
            self.outcome.worker = value.decode("latin-1")
        elif name == PREFILL_HEADER:
            self.outcome.prefill_worker = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        outcome, tail = self.outcome, self._tail
        if not outcome.chunks:
            outcome.first = self._now
        outcome.last = self._now
        outcome.chunks += 1
        outcome.size += len(body)
        tail += body
        if len(tail) > _TAIL_CUT:
            del tail[:-_TAIL_KEPT]

    def on_message_complete(self) -> None:
        if self.outcome.status == 200:
            self._finish(read_usage(bytes(self._tail), self.outcome))
        else:
            text = " ".join(self._tail[:300].decode(errors="replace").split())
            self._finish(f"status {self.outcome.status}: {text}")

    def _finish(self, error: str) -> None:
        if self.done.done():
            return
        self.outcome.error = error
        self.done.set_result(None)

    def close(self) -> None:
        """Aborts the connection in any state."""
        if self._transport is not None:
            self._transport.abort()


def read_usage(tail: bytes, outcome: Outcome) -> str:
    """Reads the token counts at the end of a stream; returns what is wrong with it, or an empty string."""
    for line in reversed(tail.splitlines()):
        if not line.startswith(b"data:") or (b'"usage"' not in line and b'"error"' not in line):
            continue
        try:
            chunk = msgspec.json.decode(line[5:], type=_LastChunk)
        except UNDECODABLE:
            return "the last chunk of the stream is not JSON"
        if chunk.error and bytes(chunk.error) != b"null":
            return f"error in the stream: {bytes(chunk.error).decode(errors='replace')[:300]}"
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            outcome.prompt_tokens, outcome.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            outcome.cached_tokens = (details.cached_tokens if details else None) or 0
            return ""
    return "the stream ended without usage"


async def send(address: Address, body: bytes, timeout: float) -> Outcome:
    """Sends a request and waits for the whole answer, at most `timeout` seconds. Errors are reported in the outcome."""
    exchange = Exchange(address.request(body), perf_counter(), asyncio.get_running_loop().create_future())
    await complete(exchange, address, timeout)
    exchange.outcome.worker = exchange.outcome.worker or address.url
    return exchange.outcome


async def complete(exchange: Exchange, address: Address, timeout: float) -> None:
    """Makes the exchange with the server, as `send` does."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(lambda: exchange, address.host, address.port, ssl=address.tls)
            await exchange.done
    except TimeoutError:
        exchange.outcome.error = f"no complete answer within {timeout:g} s"
    except OSError as error:
        exchange.outcome.error = f"cannot connect to {address.url}: {error.strerror or error}"
    finally:
        exchange.close()
