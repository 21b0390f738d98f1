"""A simulated fleet on the running event loop: `async with SimFleet(SimSettings(…)) as fleet: fleet.urls`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import zmq
from aiohttp import web

from engines.endpoints import url_host
from engines.sim.answers import warm_up
from engines.sim.clock import SimClock
from engines.sim.connectors.base import Fleet
from engines.sim.ports import check_ports
from engines.sim.server import make_app, make_bootstrap_app
from engines.sim.settings import BOOTSTRAP_PORT_OFFSET, SimSettings
from engines.sim.tokens import load_tokenizer, make_answers
from engines.sim.transfers import Transfers
from engines.sim.worker import Worker


class SimFleet:
    """Serves while it is entered; entering raises OSError when a port is taken.

    Leaving cuts running streams. `workers` and `urls` are in the same order.
    """

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.workers: list[Worker] = []
        self.urls: list[str] = []
        self.bootstraps: dict[str, str] = {}
        """A prefill worker's URL to that of its bootstrap server, where the connector has one."""
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await self._start(opening)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def _start(self, opening: AsyncExitStack) -> None:
        check_ports(self.settings)
        warm_up()
        tokenizer = load_tokenizer(self.settings.tokenizer)
        answers = make_answers(tokenizer, self.settings.seed)
        clock = SimClock(asyncio.get_running_loop(), self.settings.speedup)
        pairs = Fleet(Transfers(self.settings, asyncio.get_running_loop(), clock))
        context = make_context(self.settings)
        opening.callback(context.destroy, linger=0)
        for index in range(self.settings.workers):
            worker = Worker(index, self.settings, tokenizer, answers, clock, context, pairs)
            opening.push_async_callback(worker.close)
            self.workers.append(worker)
            port = await self._serve(make_app(worker), opening, index)
            self.urls.append(f"http://{url_host(self.settings.host)}:{port}")
            if worker.place.role == "prefill" and worker.connector.bootstraps:
                app = make_bootstrap_app(worker.place)
                worker.place.bootstrap_port = await self._serve(app, opening, BOOTSTRAP_PORT_OFFSET + index)
                self.bootstraps[self.urls[-1]] = worker.place.bootstrap_url

    async def _serve(self, app: web.Application, opening: AsyncExitStack, offset: int) -> int:
        """The port it is on."""
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # nor do the engines
            keepalive_timeout=IDLE_SECONDS,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        opening.push_async_callback(runner.cleanup)
        await runner.setup()
        port = self.settings.port and self.settings.port + offset
        await web.TCPSite(runner, self.settings.host, port).start()
        return int(runner.addresses[0][1])


def make_context(settings: SimSettings) -> zmq.Context[zmq.Socket[bytes]]:
    """With room for the two sockets of every rank: libzmq allows about a thousand, unless it is told otherwise."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = 2 * settings.workers * settings.dp_size
    if sockets > context.get(zmq.MAX_SOCKETS):
        context.set(zmq.MAX_SOCKETS, sockets)
    return context


IDLE_SECONDS = 5.0
"""How long a connection without a request stays open: the default of both engines, in real seconds."""
SHUTDOWN_SECONDS = 0.01
"""How long requests may run on when the fleet stops: real engines abort them at once too."""
