"""Which worker keeps an answer of OpenAI's Responses API.

Engines keep these answers in memory (vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1, SGLang with --enable-response-store),
so only the worker that made an answer can show it, cancel it or continue from it; the others do not know it.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

from engines.answers import UNDECODABLE
from publishers.ending import end_tasks

if TYPE_CHECKING:
    from router.http.messages import RequestHead
    from router.openai.bodies import PassedOn
    from router.workers.fleet import Fleet
    from router.workers.worker import Worker

PATH = b"/v1/responses"
REMEMBERED = 65_536
"""Answers whose workers are remembered; takes some 15 MB."""
PATIENCE = 2.0
"""Seconds that a worker may take to say whether it keeps an answer; it takes milliseconds normally."""
_ASKING = 16
"""Searches of the whole fleet at a time: clients may ask for answers that do not exist as often as they like."""
_ID = r"(?!\.)[\w.-]{1,128}"
"""Not "..", with which a worker would be asked for another path."""
_NAMED = re.compile(rf"{PATH.decode()}/({_ID})(?:/.*)?")
_ANSWERED = re.compile(rf'"id":\s*"({_ID})"'.encode())
"""The first field of an answer, and of the answer in a stream's first event."""
_OPENING = 512
"""Bytes of an answer in which its id is looked for."""


_decode_id = msgspec.json.Decoder(str | None).decode


class Kept(NamedTuple):
    """How a request relates to kept answers."""

    named: str | None = None
    """The kept answer that it is about."""
    keeps: bool = False
    """Whether its own answer may be kept."""


def read_kept(head: RequestHead, said: PassedOn) -> Kept:
    """`said`: in the request's body. Never raises: the engine reports what is malformed."""
    if not head.path.startswith(PATH):
        return Kept()
    if head.path != PATH:
        found = _NAMED.fullmatch(head.path.decode("latin-1"))
        return Kept(found[1] if found else None)
    if head.method != b"POST":
        return Kept()
    named = _read_id(said.previous_response_id)
    return Kept(named if named and re.fullmatch(_ID, named) else None, bytes(said.store) != b"false")


def _read_id(given: msgspec.Raw) -> str | None:
    try:
        named: str | None = _decode_id(given)
    except UNDECODABLE:
        return None
    return named


class KeptResponses:
    """Remembers which worker gave which answer, and asks the workers about answers that it does not know: they were
    passed on by another router or process, or before this one was started."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self._keepers: OrderedDict[str, Worker] = OrderedDict()
        """Some have left by now, and others may have joined with their names, who keep nothing of theirs."""
        self._asking = asyncio.Semaphore(_ASKING)

    def note(self, worker: Worker, opening: bytes) -> None:
        """`opening`: the first bytes of its answer."""
        found = _ANSWERED.search(opening, 0, _OPENING)
        if found:
            self._remember(found[1].decode(), worker)

    async def keeper(self, named: str, wanted: Callable[[], bool]) -> Worker | None:
        """The worker that keeps the answer; None if none is found, or nobody is asked because it is not `wanted` any
        more when its turn comes."""
        worker = self._keepers.get(named)
        if worker and self._fleet.workers.get(worker.id) is not worker:
            worker = None
        if worker is None and len(self._fleet.up) > 1:
            async with self._asking:
                worker = await self._ask(named) if wanted() else None
            if worker:
                self._remember(named, worker)
        return worker

    def _remember(self, named: str, worker: Worker) -> None:
        self._keepers[named] = worker
        self._keepers.move_to_end(named)
        if len(self._keepers) > REMEMBERED:
            self._keepers.popitem(last=False)

    async def _ask(self, named: str) -> Worker | None:
        questions = [asyncio.ensure_future(self._has(worker, named)) for worker in self._fleet.up]
        try:
            for answer in asyncio.as_completed(questions):
                if worker := await answer:
                    return worker
            return None
        finally:
            await end_tasks(questions)

    async def _has(self, worker: Worker, named: str) -> Worker | None:
        url, timeout = f"{worker.spec.url}{PATH.decode()}/{named}", aiohttp.ClientTimeout(PATIENCE)
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                return worker if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None
