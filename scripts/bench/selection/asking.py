"""A request that asks the selection service first and then goes to the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from time import perf_counter

import aiohttp

from router.ab.client import Address, Exchange, Outcome
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
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                choice = await self._service.reserve(name, body)
        except (RunError, aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return Outcome(sent, error=f"no worker was selected: {str(error) or 'no answer in time'}")
        try:
            outcome = await self._ask(Address.parse(choice.endpoint), body, sent, name, deadline)
        finally:
            await self._service.release(name)
        outcome.worker = choice.endpoint
        return outcome

    async def _ask(self, address: Address, body: bytes, sent: float, name: str, deadline: float) -> Outcome:
        """As router.ab.client.send does; ends when the service also knows that the prompt is computed."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            exchange = _Watched(
                address.request(body),
                sent,
                loop.create_future(),
                lambda: group.create_task(self._service.prefilled(name)),
            )
            await _complete(exchange, address, deadline)
        return exchange.outcome


async def _complete(exchange: Exchange, address: Address, deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.get_running_loop().create_connection(lambda: exchange, address.host, address.port)
            await exchange.done
    except TimeoutError:
        exchange.outcome.error = "no complete answer in time"
    except OSError as error:
        exchange.outcome.error = f"cannot connect to {address.url}: {error.strerror or error}"
    finally:
        exchange.close()
