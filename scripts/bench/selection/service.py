"""Dynamo's selection service: started with its defaults, told of a fleet, checked to hear it, and asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engines.probe import probe
from publishers.dialogue import converse
from router.ab.errors import RunError
from router.ab.prompts import END_TOKEN
from scripts.bench import peers
from scripts.bench.processes import CannotStart, Child, free_port, python_of, status

from . import forms

PEER = "ai-dynamo"
_ANSWER, _HEARD, _POLL = 10.0, 15.0, 0.05
"""Seconds: for an engine to say what it is, for its events to arrive at the service, between two looks."""


class Tally(msgspec.Struct):
    """What the service said over a run: tokens of prompts, those of them it took for cached, and calls that failed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    failures: list[str] = msgspec.field(default_factory=list)


class Service:
    """The calls that a run makes. Connections are kept and used again."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self.tally = Tally()
        self._url, self._model, self._session = url, model, session

    async def register(self, worker: forms.Worker) -> None:
        code, answer = await self._call("POST", "/workers", forms.registration(worker))
        if code != 201:
            raise RunError(f"the selection service refused {worker.endpoint}: {_said(code, answer)}")

    async def ready(self) -> forms.Ready:
        return forms.read_ready((await self._call("GET", "/ready"))[1])

    async def cached_blocks(self, worker: int, tokens: list[int]) -> int:
        code, answer = await self._call("POST", "/overlap_scores", forms.overlap_query(self._model, tokens))
        if code != 200:
            raise RunError(f"the selection service tells no overlap: {_said(code, answer)}")
        return forms.cached_blocks(answer, worker)

    async def reserve(self, name: str, body: bytes) -> forms.Selection:
        """A worker for the completion request `body`, booked under `name`. Raises RunError, aiohttp.ClientError."""
        code, answer = await self._call("POST", "/select_and_reserve", forms.selection(name, self._model, body))
        if code != 200:
            raise RunError(_said(code, answer))
        choice = forms.read_selection(answer)
        self.tally.prompt_tokens += choice.isl_tokens
        self.tally.cached_tokens += choice.overlap.gpu
        return choice

    async def prefilled(self, name: str) -> None:
        await self._tell("POST", forms.prefill_complete(name))

    async def release(self, name: str) -> None:
        await self._tell("DELETE", forms.reservation(name))

    async def _tell(self, method: str, path: str) -> None:
        """A failure is kept, not raised: the answer to the request is there all the same."""
        try:
            code, answer = await self._call(method, path)
        except (aiohttp.ClientError, OSError) as error:
            self.tally.failures.append(f"{method} {path}: {error}")
        else:
            if code != 200:
                self.tally.failures.append(f"{method} {path}: {_said(code, answer)}")

    async def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body else None
        async with self._session.request(method, self._url + path, data=body, headers=headers) as answer:
            return answer.status, await answer.read()


def _said(code: int, answer: bytes) -> str:
    return f"status {code}: {answer[:300].decode(errors='replace')}"


def check() -> None:
    """Before a run: the package is there, and nothing tunes it. Raises RunError."""
    if tuned := sorted(name for name in os.environ if name.startswith("DYN_")):
        raise RunError(f"the selection service is measured with its defaults; unset {', '.join(tuned)}")
    if reason := peers.install(PEER):
        raise RunError(f"{PEER} {reason}")


@asynccontextmanager
async def started(workers: Sequence[str], model: str) -> AsyncIterator[Service]:
    """The service, knowing `workers` and heard to follow the events of each. Raises RunError."""
    port = free_port()
    command = [python_of(peers.venv_of(PEER)), "-m", "dynamo.select_service", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    child = Child("dynamo-select", command, {"DYN_LOG": "warn"})
    try:
        await _until_up(child, url)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            service = Service(url, model, session)
            await _introduce(service, session, workers, model)
            yield service
    finally:
        await asyncio.to_thread(child.stop)


async def _until_up(child: Child, url: str) -> None:
    try:
        await asyncio.to_thread(child.wait_until, lambda: status(f"{url}/health") == 200)
    except CannotStart as error:
        raise RunError(str(error)) from None


async def _introduce(service: Service, session: aiohttp.ClientSession, urls: Sequence[str], model: str) -> None:
    workers = [await _describe(session, number, url, model) for number, url in enumerate(urls)]
    for worker in workers:
        await service.register(worker)
    ready = await service.ready()
    if ready.schedulable_workers != len(workers):
        raise RunError(f"the selection service would not choose every worker: {ready.reasons()}")
    await asyncio.gather(*(_until_heard(service, session, worker) for worker in workers))


async def _describe(session: aiohttp.ClientSession, number: int, url: str, model: str) -> forms.Worker:
    """What our own router would find out from the engine, and nothing else."""
    found, _ = await converse(probe(urlsplit(url).hostname or ""), session, url, _ANSWER)
    if found.block_size is None or len(found.event_sources) != 1:
        raise RunError(f"{url} does not tell its block size and one event endpoint; here a worker has one rank")
    source = found.event_sources[0]
    return forms.Worker(number, model, url, found.block_size, source.endpoint, source.replay, found.total_blocks)


async def _until_heard(service: Service, session: aiohttp.ClientSession, worker: forms.Worker) -> None:
    """A prompt that no trace has is computed there; the service must then take its blocks for cached."""
    try:
        async with asyncio.timeout(_HEARD):
            for attempt in count():
                tokens = [END_TOKEN + 1000 * worker.worker_id + attempt] * (4 * worker.block_size + 1)
                await _compute(session, worker, tokens)
                await asyncio.sleep(_POLL)
                if await service.cached_blocks(worker.worker_id, tokens) == 4:
                    return
    except TimeoutError:
        raise RunError(
            f"the selection service takes nothing for cached of what {worker.endpoint} computed: it does not hear "
            f"its events at {worker.kv_events_endpoint}, and comparing with it would be unfair"
        ) from None


async def _compute(session: aiohttp.ClientSession, worker: forms.Worker, tokens: list[int]) -> None:
    body = {"model": worker.model_name, "prompt": tokens, "max_tokens": 1}
    async with session.post(f"{worker.endpoint}/v1/completions", json=body) as answer:
        await answer.read()
