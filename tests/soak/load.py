"""An open loop of requests, each answer judged: prompts that share beginnings, new beginnings all the time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable

from tests.chaos.answers import NotWhole, Wrong, judge
from tests.chaos.load import Asker, Left, Manners
from tests.chaos.questions import Question, chat, completion
from tests.chaos.router_actor import RouterActor

MOST_IN_FLIGHT = 1000
"""Beyond that the machine cannot carry the load, and what is measured says nothing."""
KEPT = 50
"""Beginnings that are still asked again."""
KEPT_FAULTS = 10

_WORDS = [f"word{number}" for number in range(100)]


class TooMuch(Exception):
    """The load is more than the machine carries."""


class Prompts:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._beginnings: deque[str] = deque(maxlen=KEPT)

    def next(self) -> Question:
        draw = self._draw
        if not self._beginnings or draw.random() < 0.4:
            self._beginnings.append(self._words(draw.randint(60, 200)))
        prompt = draw.choice(self._beginnings) + self._words(draw.randint(1, 20))
        tokens, streamed = draw.randint(4, 32), draw.random() < 0.7
        return chat(prompt, tokens, streamed) if draw.random() < 0.1 else completion(prompt, tokens, streamed, ids=True)

    def _words(self, count: int) -> str:
        return " ".join(self._draw.choices(_WORDS, k=count)) + " "


class Load:
    """`rate` requests a second from `start` to `stop`. `explains`: whether a request between two moments may fail."""

    def __init__(
        self, router: RouterActor, rate: float, draw: random.Random, explains: Callable[[float, float], bool]
    ) -> None:
        self.rate = rate
        self.fates: Counter[str] = Counter()
        """answered, left, broken (ended with an error event), refused, cut (not streamed, and the connection broke)."""
        self.faults: list[str] = []
        """What no death explains: the first of each kind."""
        self.unexplained = 0
        self._router = router
        self._draw = draw
        self._explains = explains
        self._prompts = Prompts(draw)
        self._idle: list[Asker] = []
        self._running: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._loop.done()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def start(self) -> None:
        self._loop = asyncio.create_task(self._open_loop())

    async def stop(self) -> None:
        """Returns when every request has ended. Raises TooMuch."""
        assert self._loop
        self._loop.cancel()
        stopped, *_ = await asyncio.gather(self._loop, *self._running, return_exceptions=True)
        for asker in self._idle:
            asker.close()
        if isinstance(stopped, TooMuch):
            raise stopped

    async def _open_loop(self) -> None:
        due = time.monotonic()
        while True:
            due += self._draw.expovariate(self.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._running) > MOST_IN_FLIGHT:
                raise TooMuch(f"{self.rate:.0f} requests a second are more than this machine carries")
            task = asyncio.create_task(self._one(self._prompts.next()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _one(self, question: Question) -> None:
        asker = self._idle.pop() if self._idle else Asker(self._router, self._draw)
        manners: Manners = "leaves" if self._draw.random() < 0.05 else "usual"
        began = time.monotonic()
        fate, fault = await self._fate(asker, question, manners)
        self.fates[fate] += 1
        if fate not in {"answered", "left"} and (fault or not self._explains(began, time.monotonic())):
            self._blame(f"{fate}, {question.path}, {'streamed' if question.streamed else 'whole'}: {fault}")
        self._idle.append(asker)

    async def _fate(self, asker: Asker, question: Question, manners: Manners) -> tuple[str, str]:
        """What became of it, and what no death of a worker may do to it."""
        try:
            came = await asker.ask(question, manners)
            return judge(question, came), ""
        except Left:
            return "left", ""
        except NotWhole as error:
            return "cut", f"a stream without an end: {error}" if question.streamed else ""
        except Wrong as error:
            return "wrong", str(error)
        except (OSError, EOFError, TimeoutError) as error:
            return "lost", repr(error)

    def _blame(self, what: str) -> None:
        self.unexplained += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(what)
