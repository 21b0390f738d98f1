"""Who is asked: the store's master, a worker, a router. Raises Away for one that does not answer as it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import aiohttp
from yarl import URL

from engines.store import (
    Counted,
    Health,
    Segment,
    Stored,
    query_path,
    read_counted,
    read_health,
    read_keys,
    read_query,
    read_segments,
)
from engines.store.master import HEALTH, METRICS
from engines.store.query import ALL_KEYS, SEGMENTS, in_parts
from publishers.reasons import reason_of
from router.store_cli.errors import Away, WrongUse

_T = TypeVar("_T")

TIMEOUT = 10.0
"""Seconds for one answer."""
LISTING: Final = 1e-4
"""Seconds more for each key that a master lists: it takes 5 to 20 µs, and longer where it is busy."""


class Peer:
    def __init__(self, session: aiohttp.ClientSession, what: str, url: str, key: str | None = None) -> None:
        """`what`: as people call it. `key`: an API key."""
        self._session = session
        self.what = what
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def get(self, path: str, limit: float = TIMEOUT) -> bytes:
        """`limit`: seconds."""
        status, body = await self.ask("GET", path, limit=limit)
        if status != 200:
            raise Away(f"{self.what} answers {path.partition('?')[0]} with {status}; is {self.url} the right address?")
        return body

    async def ask(self, method: str, path: str, body: bytes | None = None, limit: float = TIMEOUT) -> tuple[int, bytes]:
        url, timeout = URL(self.url + path, encoded=True), aiohttp.ClientTimeout(limit)
        headers = self._headers | ({"content-type": "application/json"} if body is not None else {})
        try:
            async with self._session.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Away(f"{self.what} does not answer at {self.url}: {reason_of(error, '--ca')}.") from None


class Master(Peer):
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(session, "The store's master", url)

    async def health(self) -> Health:
        return read_health(await self.get(HEALTH))

    async def counted(self) -> Counted:
        return read_counted(await self.get(METRICS))

    async def segments(self) -> list[Segment]:
        return await self._read(SEGMENTS, read_segments)

    async def keys(self, about: int) -> list[str]:
        """All of them, which are `about` so many."""
        return [key for key in await self._read(ALL_KEYS, read_keys, TIMEOUT + about * LISTING) if key]

    async def objects(self, keys: Sequence[str]) -> dict[str, Stored]:
        """Those that are there. WrongUse for keys that cannot be asked for."""
        found: dict[str, Stored] = {}
        for part in in_parts(keys):
            path = query_path(part)
            if path is None:
                raise WrongUse("The store cannot be asked: the model's name has a comma.")
            found |= await self._read(path, read_query)
        return found

    async def _read(self, path: str, read: Callable[[bytes], _T], limit: float = TIMEOUT) -> _T:
        try:
            return read(await self.get(path, limit))
        except ValueError as error:
            raise Away(f"{self.what} answers {path.partition('?')[0]} with nonsense: {error}.") from None
