"""A request that asks the selection service first and then goes to the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from time import perf_counter

import aiohttp

from router.ab.client import Address, Exchange, Outcome, complete
from router.ab.errors import RunError

from .service import Service


class _Watched(Exchange):
    """Calls `on_first` at the first byte of the answer's body."""

    def __init__(self, request: bytes, sent: float, done: asyncio.Future[None], on_first: Callable[[], object]) -> None:
        super().__init__(request, sent, done)
        self._on_first = on_first

    def on_body(self, body: bytes) -> None:
        first = not self.outcome.chunks
        super().on_body(body)
        if first:
            self._on_first()


class Asking:
    """Sends requests with the service's help; times count from before it is asked."""

    def __init__(self, service: Service, timeout: float) -> None:
        self._service, self._timeout, self._names = service, timeout, count()

    async def send(self, body: bytes) -> Outcome:
        """Errors are in the outcome."""
        name, sent = str(next(self._names)), perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                choice = await self._service.reserve(name, body)
        except (RunError, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return Outcome(sent, error=f"no worker was selected: {str(error) or 'no answer in time'}")
        try:
            outcome = await self._ask(Address.parse(choice.endpoint), body, sent, name)
        finally:
            await self._service.release(name)
        outcome.worker = choice.endpoint
        return outcome

    async def _ask(self, address: Address, body: bytes, sent: float, name: str) -> Outcome:
        """As router.ab.client.send does; ends when the service also knows that the prompt is computed."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            exchange = _Watched(
                address.request(body),
                sent,
                loop.create_future(),
                lambda: group.create_task(self._service.prefilled(name)),
            )
            await complete(exchange, address, sent + self._timeout - perf_counter())
        return exchange.outcome
