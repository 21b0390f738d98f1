"""The load generator: a process of its own that prints one line of JSON.

Closed loop: each connection sends its next request when the answer to the last is whole. Open loop (`--rate`): requests
fall due at random moments (Poisson) whatever the answers do, and go to the connections in turn; one that finds its
connection busy waits, and its wait counts. A request's clock starts when the generator takes it up, so that the
generator's own timers (1 ms) add nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import deque
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import uvloop

from .answer_reader import AnswerReader
from .corpus import sentences
from .cpu import tree_seconds
from .pairs import percentile
from .workloads import WORKLOADS, Bodies, Workload

GRACE = 20.0
"""Seconds that answers may take after the last request."""


class Outcome(NamedTuple):
    """`cpu`: seconds of the watched process tree from the end of the warm-up to the last answer; -1: none watched."""

    requests: int
    errors: int
    seconds: float
    cpu: float
    p50: float
    p99: float
    """Latencies in seconds; all of them would be megabytes."""


class Connection(asyncio.Protocol):
    def __init__(self, load: Load, host: str, bodies: Bodies) -> None:
        self._load = load
        self._head = f"POST {load.workload.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._bodies = bodies
        self._reader = AnswerReader()
        self._due: deque[float] = deque()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self) -> None:
        """Send a request, now or when the ones before it are answered."""
        self._due.append(time.perf_counter())
        if len(self._due) == 1:
            self._send()

    def _send(self) -> None:
        body = next(self._bodies)
        if self.transport:
            self.transport.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        status = self._reader.feed(data)
        if status is None:
            return
        began = self._due.popleft()
        if self._due:
            self._send()
        self._load.answered(self, began, status == 200 and self._reader.size >= self._load.workload.least)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- a Protocol
        self._load.lost(len(self._due))
        self.transport = None


class Load:
    def __init__(self, args: argparse.Namespace) -> None:
        self.workload: Workload = WORKLOADS[args.workload]
        self._args = args
        # Loads follow each other in front of one router, whose workers would still hold the prompts of another.
        self._random = random.Random(f"{args.workload}, {args.connections} connections, {args.seed}")
        self._connections: list[Connection] = []
        self._stopping = False
        self._outstanding = 0
        self._measuring = False
        self._latencies: list[float] = []
        self._errors = 0
        self._idle = asyncio.Event()

    async def run(self) -> Outcome:
        await self._connect()
        await self._go(self._args.warm_up)
        cpu, began = self._cpu(), time.perf_counter()
        self._measuring = True
        await self._go(self._args.seconds)
        seconds = time.perf_counter() - began
        spent = self._cpu() - cpu if self._args.pid else -1.0
        self._close()
        ordered = sorted(self._latencies) or [0.0]
        p50, p99 = (percentile(ordered, share) for share in (0.5, 0.99))
        return Outcome(len(self._latencies), self._errors, seconds, spent, p50, p99)

    async def _connect(self) -> None:
        url = urlsplit(self._args.url)
        text = sentences()
        for _ in range(self._args.connections):
            bodies = self.workload.bodies(random.Random(self._random.random()), text)
            connection = Connection(self, url.netloc, bodies)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda made=connection: made, url.hostname, url.port)  # type: ignore[misc]  # mypy cannot infer the lambda's default
            self._connections.append(connection)

    def _close(self) -> None:
        for connection in self._connections:
            if connection.transport:
                connection.transport.close()

    async def _go(self, seconds: float) -> None:
        """Ask for so long, then wait until all is answered."""
        self._stopping = False
        self._idle.clear()
        if self._args.rate:
            await self._open_loop(seconds)
        else:
            for connection in self._connections:
                self._ask(connection)
            await asyncio.sleep(seconds)
        self._stopping = True
        if not self._outstanding:
            return
        try:
            await asyncio.wait_for(self._idle.wait(), GRACE)
        except TimeoutError:
            lost = sum(connection.transport is None for connection in self._connections)
            sys.exit(f"{self._outstanding} requests had no answer after {GRACE:g} s; {lost} connections were closed")

    async def _open_loop(self, seconds: float) -> None:
        now = time.perf_counter()
        end, due, turn = now + seconds, now, 0
        while due < end:
            while due <= time.perf_counter():
                self._ask(self._connections[turn % len(self._connections)])
                turn += 1
                due += self._random.expovariate(self._args.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def _ask(self, connection: Connection) -> None:
        if connection.transport is None:
            self._errors += 1  # nobody would ever answer
            return
        self._outstanding += 1
        connection.ask()

    def answered(self, connection: Connection, began: float, good: bool) -> None:
        self._outstanding -= 1
        if self._measuring:
            self._errors += not good
            self._latencies.append(time.perf_counter() - began)
        if not self._args.rate and not self._stopping:
            self._ask(connection)
        elif self._stopping and not self._outstanding:
            self._idle.set()

    def lost(self, requests: int) -> None:
        """A connection closed with so many requests unanswered; it is not opened again."""
        self._errors += requests
        self._outstanding -= requests
        if self._stopping and not self._outstanding:
            self._idle.set()

    def _cpu(self) -> float:
        return tree_seconds(self._args.pid) if self._args.pid else 0.0


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.load")
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: closed loop")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pid", type=int, default=0, help="process whose CPU time, with its descendants', is taken")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> None:
    args = arguments(sys.argv[1:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(Load(args).run())
    print(json.dumps(outcome._asdict()))


if __name__ == "__main__":
    main()
