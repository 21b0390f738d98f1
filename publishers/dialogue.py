"""Drives the dialogues of `engines` (which only say what to GET) with an HTTP client."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import aiohttp

from engines.probe import Answer
from publishers.reasons import reason_of

_T = TypeVar("_T")

MOST_BYTES = 64 * 1024**2
"""Of an answer that is read whole, unpacked. A prompt's tokens as JSON take as much as a long prompt; the rest is less.
"""


async def converse(
    steps: Generator[str, Answer, _T], session: aiohttp.ClientSession, url: str, timeout: float
) -> tuple[_T, str]:
    """What the dialogue found out, and why the first request that was not answered was not: "" when all were. `timeout`
    in seconds for each.

    A status of 500 and more is no answer: so says whatever stands before an engine that is still starting.
    """
    trouble = ""
    try:
        path = next(steps)
        while True:
            answer, why = await _get(session, url.rstrip("/"), path, timeout)
            trouble = trouble or why
            path = steps.send(answer)
    except StopIteration as done:
        found: _T = done.value
        return found, trouble


async def _get(session: aiohttp.ClientSession, url: str, path: str, timeout: float) -> tuple[Answer, str]:
    try:
        async with session.get(url + path, timeout=aiohttp.ClientTimeout(timeout), allow_redirects=False) as response:
            answer = Answer(response.status, await read_whole(response))
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return Answer(0), f"cannot be reached: {reason_of(error)}"
    return answer, f"{path} answered {answer.status}" if answer.status >= 500 else ""


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """Its body. Raises aiohttp.ClientPayloadError for one larger than MOST_BYTES."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > MOST_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MOST_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
