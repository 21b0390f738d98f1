"""A worker whose streams get a token now and then: prints its URL as one line of JSON.

Each stream counts from its own beginning, so that they do not all come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import uvloop

from scripts.bench.fake_worker import _STREAM, _STREAM_HEAD, Serving, Worker


class SlowWorker(Worker):
    def __init__(self, tokens: int, interval: float) -> None:
        """`interval` in seconds."""
        super().__init__("/load", 0.0, None)
        self._tokens = tokens
        self._interval = interval

    def _stream(self, transport: asyncio.Transport, chat: bool) -> None:
        transport.write(_STREAM_HEAD)
        self._next(transport, [*_STREAM[chat][: self._tokens], _STREAM[chat][-1]])

    def _next(self, transport: asyncio.Transport, left: list[bytes]) -> None:
        if transport.is_closing():
            return
        transport.write(left[0])
        if left[1:]:
            asyncio.get_running_loop().call_later(self._interval, self._next, transport, left[1:])


async def serve(tokens: int, interval: float) -> None:
    worker = SlowWorker(tokens, interval)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Serving(worker), "127.0.0.1", 0, backlog=4096)
    ready = {"workers": [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.slow_worker", description=__doc__)
    parser.add_argument("--tokens", type=int, required=True, help="of each stream")
    parser.add_argument("--interval", type=float, required=True, help="seconds between two tokens")
    args = parser.parse_args()
    uvloop.run(serve(args.tokens, args.interval))


if __name__ == "__main__":
    main()
