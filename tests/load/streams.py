"""`python -m tests.load.streams`: opens so many streams and reads each to its end; prints a line of JSON.

Its parent is told by a line `open` when all have begun, so that it can look at what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import cast
from urllib.parse import urlsplit

import uvloop

from scripts.bench.workloads import MODEL

TOGETHER = 64
"""Streams that may be waiting for their first byte: the kernel's queue of connections has an end."""
_BODY = json.dumps({"model": MODEL, "prompt": "All at once, for long.", "max_tokens": 64, "stream": True}).encode()
_LAST = b"data: [DONE]\n\n"


class Stream(asyncio.Protocol):
    """`begun` and `ended` are events; `whole`: it began with 200 and ended with [DONE]."""

    def __init__(self, host: str) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(_BODY)}\r\n\r\n".encode() + _BODY
        self._last = b""
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.good = self.whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.is_set():
            self.good = data.startswith(b"HTTP/1.1 200")
            self.begun.set()
        self._last = (self._last + data)[-64:]
        if _LAST in self._last or not self.good:
            self.whole = self.good
            self._transport.close()
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.begun.set()
        self.ended.set()


async def hold(url: str, count: int, patience: float) -> dict[str, int]:
    """`patience`: seconds that the last stream may take after it has begun."""
    where, room = urlsplit(url), asyncio.Semaphore(TOGETHER)
    streams = await asyncio.gather(*(_open(where.hostname or "", where.port or 80, room) for _ in range(count)))
    held = sum(stream.good and not stream.ended.is_set() for stream in streams if stream)
    _say("open")
    try:
        async with asyncio.timeout(patience):
            for stream in streams:
                if stream:
                    await stream.ended.wait()
    except TimeoutError:
        pass  # what is not whole by now counts as that
    return {"asked": count, "held": held, "whole": sum(stream.whole for stream in streams if stream)}


async def _open(host: str, port: int, room: asyncio.Semaphore) -> Stream | None:
    async with room:
        try:
            _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(host), host, port)
            async with asyncio.timeout(60):
                await stream.begun.wait()
        except (OSError, TimeoutError):
            return None
        return stream


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.streams", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True, help="seconds")
    args = parser.parse_args()
    _say(json.dumps(uvloop.run(hold(args.url, args.count, args.patience))))


if __name__ == "__main__":
    main()
