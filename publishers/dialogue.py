"""Asks engines over HTTP: single paths, and the dialogues of `engines`, which only say what to GET."""

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


TIMED_OUT = -1
"""Status of an answer that did not come in time."""


async def converse(
    steps: Generator[str, Answer, _T],
    session: aiohttp.ClientSession,
    url: str,
    timeout: float,
    *,
    twice: bool = False,
) -> tuple[_T, str]:
    """What the dialogue found out, and why the first request that failed did so: "" when none did. `timeout`: seconds
    for each. `twice`: repeat a request once whose connection fails."""
    trouble = ""
    try:
        path = next(steps)
        while True:
            answer, why = await fetch(session, url, path, timeout)
            if twice and answer.status == 0:
                answer, why = await fetch(session, url, path, timeout)
            trouble = trouble or why
            path = steps.send(answer)
    except StopIteration as done:
        found: _T = done.value
        return found, trouble


async def fetch(session: aiohttp.ClientSession, url: str, path: str, timeout: float) -> tuple[Answer, str]:
    """The answer, with status 0 or TIMED_OUT where there is none; and why the request failed, "" when it did not. A
    status of 500 and more is a failure: a proxy before an engine that is still starting answers so."""
    url, limit = url.rstrip("/") + path, aiohttp.ClientTimeout(timeout)
    try:
        async with session.get(url, timeout=limit, allow_redirects=False) as response:
            answer = Answer(response.status, await read_whole(response))
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        status = TIMED_OUT if isinstance(error, TimeoutError) else 0
        return Answer(status), f"cannot be reached: {reason_of(error, '--worker-ca')}"
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
