"""Requests of a run to engines and routers besides completions: readiness, served model, reset of prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from engines.answers import UNDECODABLE
from publishers.reasons import reason_of
from router.ab.client import Address
from router.ab.errors import RunError
from router.ab.prompts import FIRST_TOKEN
from router.security.worker_access import WorkerAccess

_ANSWER = aiohttp.ClientTimeout(total=10)
_OF_VLLM, _OF_SGLANG = "/reset_prefix_cache?reset_external=true", "/flush_cache"
"""What resets caches. vLLM has it with VLLM_SERVER_DEV_MODE=1, and would leave host memory, disk and stores as they are
without the parameter, which an older one passes over."""
_TRIES, _AGAIN = 40, 0.25
"""How often a busy worker is asked to empty its cache, and seconds between two times. Neither engine does so while
anything holds blocks, as requests do for a moment after the mode before gave them up, or copies to host memory."""
_POLL = 0.05
"""Seconds between two questions whether a router is ready."""
_REACHED = 5.0
"""Seconds to connect in."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Emptied(msgspec.Struct):
    success: bool


async def served_model(urls: Sequence[str], access: WorkerAccess, wanted: str | None = None) -> str:
    """`wanted`, or the model that all workers serve. Raises RunError for a worker that is down or serves another."""
    async with access.session(lambda: urls) as session:
        names = await asyncio.gather(*(_model(session, url) for url in urls))
    if wanted is not None:
        return wanted
    for url, name in zip(urls, names, strict=True):
        if name != names[0]:
            raise RunError(f"{urls[0]} serves {names[0]} but {url} serves {name}; give --model NAME")
    return names[0]


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models", timeout=_ANSWER) as answer:
            body = await answer.read()
        if answer.status in (401, 403):
            raise RunError(f"the worker {url} wants a key: status {answer.status}; give it with --worker-api-key-file")
        return msgspec.json.decode(body, type=_Models).data[0].id
    except aiohttp.ClientSSLError as error:
        raise RunError(f"the worker {url} cannot be asked: {reason_of(error, '--worker-ca')}") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RunError(f"the worker {url} does not answer: {reason_of(error)}; start it or leave it out") from None
    except (*UNDECODABLE, IndexError):
        raise RunError(f"{url}/v1/models lists no model; is {url} an engine?") from None


async def reset_caches(urls: Sequence[str], access: WorkerAccess, model: str) -> list[str]:
    """Empties every worker's prefix cache. Returns the URLs of those that refused."""
    async with access.session(lambda: urls) as session:
        emptied = await asyncio.gather(*(_reset(session, url, model) for url in urls))
    return [url for url, fine in zip(urls, emptied, strict=True) if not fine]


async def _reset(session: aiohttp.ClientSession, url: str, model: str) -> bool:
    for _ in range(_TRIES):
        emptied = await _reset_once(session, url, model)
        if emptied is not None:
            return emptied
        await asyncio.sleep(_AGAIN)
    return False


async def _reset_once(session: aiohttp.ClientSession, url: str, model: str) -> bool | None:
    """None: the worker is busy."""
    for path in (_OF_VLLM, _OF_SGLANG):
        try:
            async with session.post(url + path, timeout=_ANSWER) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        if status == 400 or (status == 200 and _tells_failure(body)):  # the one is SGLang's answer, the other vLLM's
            return None
        if status == 200:
            if path == _OF_VLLM:
                await _step(session, url, model)
            return True
    return False


async def _step(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """vLLM publishes that its cache is empty with its next step only: until then a router that starts now would be told
    of what the mode before has left there. One token fills no block."""
    body = {"model": model, "prompt": [FIRST_TOKEN], "max_tokens": 1}
    try:
        async with session.post(f"{url}/v1/completions", json=body, timeout=_ANSWER) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass  # the run will tell


def _tells_failure(body: bytes) -> bool:
    """vLLM answers 200 either way, and tells since 0.26 which it is."""
    try:
        return not msgspec.json.decode(body, type=_Emptied).success
    except UNDECODABLE:
        return False


async def check_reached(flag: str, address: Address) -> None:
    """Raises RunError, which names `flag`, if nothing listens there."""
    try:
        async with asyncio.timeout(_REACHED):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (TimeoutError, OSError) as error:
        raise RunError(f"{flag}: nothing answers at {address.url} ({reason_of(error)}); start it first") from None
    writer.close()


async def until_ready(url: str) -> None:
    """Waits, without a time limit, until GET /ready answers 200."""
    async with aiohttp.ClientSession(timeout=_ANSWER) as session:
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # not listening yet
            await asyncio.sleep(_POLL)
