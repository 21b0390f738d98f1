"""Clients: each asks one question after another, reads well or slowly or leaves, and has every answer judged."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Literal

from tests.chaos.answers import Came, NotWhole, Wrong, judge
from tests.chaos.ledger import Ledger
from tests.chaos.questions import Question, Questions
from tests.chaos.router_actor import RouterActor
from tests.fakes.raw_client import RawClient, post

PATIENCE = 40.0
"""Seconds without a byte after which a request is lost."""
AGAIN_WITHIN = 30.0
SMALL = 4096
"""Bytes that a slow reader's socket takes."""

IDLE = 50.0
"""Seconds after which a connection is not used again: the router closes one of 75, and might just then."""

Manners = Literal["usual", "slow", "leaves"]


class Left(Exception):
    """On purpose."""


class Asker:
    """One connection while it lasts."""

    def __init__(self, router: RouterActor, draw: random.Random) -> None:
        self._router = router
        self._draw = draw
        self._client: RawClient | None = None
        self._start = 0
        self._used_at = 0.0

    async def ask(self, question: Question, manners: Manners = "usual", *headers: bytes) -> Came:
        """Raises Left, OSError, EOFError or TimeoutError; then, or after half an answer, the connection is given up."""
        came = None
        try:
            client = await self._connected(manners)
            client.send(post(question.path, question.body, *headers))
            if manners == "leaves" and self._draw.random() < 0.3:
                await asyncio.sleep(self._draw.random() * 0.05)
                raise Left
            came = await self._answer(client, manners)
        finally:
            if came is None or not came.whole or manners != "usual" or self._draw.random() < 0.1:
                self.close()
        return came

    def close(self) -> None:
        client, self._client = self._client, None
        if client and self._draw.random() < 0.5:
            client.leave()
        elif client:
            client.vanish()

    async def _connected(self, manners: Manners) -> RawClient:
        now, before = time.monotonic(), self._used_at
        self._used_at = now
        if self._client is None or self._start != self._router.starts or manners == "slow" or now - before > IDLE:
            self.close()
            self._start = self._router.starts
            client = RawClient(self._router.port, SMALL if manners == "slow" else None, patience=PATIENCE)
            self._client = await client.__aenter__()
        return self._client

    async def _answer(self, client: RawClient, manners: Manners) -> Came:
        head = await client.head()
        chunked = head.header(b"transfer-encoding") == b"chunked"
        body = b""
        try:
            if not chunked:
                length = int(head.header(b"content-length") or b"0")
                return Came(head.status, await client.read_exactly(length), whole=True)
            left = self._draw.randint(1, 20)
            while piece := (await client.chunk())[1]:
                body += piece
                left -= 1
                if manners == "leaves" and not left:
                    raise Left
                if manners == "slow":
                    await asyncio.sleep(0.01)
        except (OSError, EOFError):
            return Came(head.status, body, whole=False)
        return Came(head.status, body, whole=True)


class Load:
    """`clients` of them, until `stop`; `well` tells how many workers are."""

    def __init__(
        self, router: RouterActor, ledger: Ledger, clients: int, pause: float, seed: str, well: Callable[[], int]
    ) -> None:
        self._router = router
        self._ledger = ledger
        self._pause = pause
        self._well = well
        self._stopped = asyncio.Event()
        draws = [random.Random(f"{seed}/{number}") for number in range(clients)]
        self._tasks = [asyncio.create_task(self._client(draw)) for draw in draws]

    async def stop(self) -> None:
        """Returns when every request has ended."""
        self._stopped.set()
        await asyncio.gather(*self._tasks)

    async def _client(self, draw: random.Random) -> None:
        questions, asker = Questions(draw), Asker(self._router, draw)
        while not self._stopped.is_set():
            await self._router.up.wait()
            kind = draw.random()
            manners: Manners = "slow" if kind < 0.02 else "leaves" if kind < 0.1 else "usual"
            long = manners == "slow" or draw.random() < 0.02
            await self._one(asker, questions.next(streamed=True if long else None, long=long), manners)
            await asyncio.sleep(draw.expovariate(1 / self._pause))
        asker.close()

    async def _one(self, asker: Asker, question: Question, manners: Manners) -> None:
        ledger, began, well = self._ledger, time.monotonic(), self._well() * self._router.serves
        try:
            came = await asker.ask(question, manners)
            fate = judge(question, came)
        except Left:
            ledger.left += 1
        except NotWhole as error:
            if question.streamed or self._router.excuses(began, time.monotonic()):
                await self._unanswered(asker, question, began, str(error))
            else:
                ledger.fates["broken"] += 1
        except Wrong as wrong:
            asked = "streamed" if question.streamed else "whole"
            ledger.violate(f"{question.path} {asked}: {wrong}; {came.status}, ended with {came.body[-300:]!r}")
        except (OSError, EOFError, TimeoutError) as error:
            await self._unanswered(asker, question, began, repr(error))
        else:
            ledger.fates[fate] += 1
            if came.status >= 500 and min(well, self._well()) > 0:
                ledger.unserved += 1
                ledger.refusals[came.body[:200]] += 1

    async def _unanswered(self, asker: Asker, question: Question, began: float, why: str) -> None:
        ledger = self._ledger
        if not self._router.excuses(began, time.monotonic()):
            ledger.lost += 1
            ledger.violate(f"LOST: {question.path} after {time.monotonic() - began:.1f} s: {why}")
            return
        ledger.cut += 1
        if await self._again(asker, question):
            ledger.asked_again += 1
        else:
            ledger.violate(f"{question.path}, cut with the router, was not answered within {AGAIN_WITHIN:g} s either")

    async def _again(self, asker: Asker, question: Question) -> bool:
        """As a client does that sees its connection break."""
        end = time.monotonic() + AGAIN_WITHIN
        while time.monotonic() < end:
            await self._router.up.wait()
            try:
                if judge(question, await asker.ask(question)) == "answered":
                    return True
            except (OSError, EOFError, TimeoutError, NotWhole):  # its worker or the router may be killed this time too
                pass
            await asyncio.sleep(0.2)
        return False
