"""Building blocks of synthetic traffic (pure): drawn sizes, arrivals, texts that many share, prompts that grow.

Everything is drawn from one `Source`, so a seed decides a trace. Ids follow `router.ab.trace`: equal ids are equal
content after an equal prefix, and a text that is shared is a whole number of blocks.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, cycle, islice
from typing import NamedTuple

from router.ab.trace import BLOCK_TOKENS, Row

SECONDS_PER_TOKEN = 0.02
"""How fast whoever sends the next turn is assumed to have got the last answer. Arrivals of a trace do not react, so
without this a turn could come before the answer that it goes on from could have been made."""


class Source:
    """Randomness, and ids for content that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - traffic, not secrets
        self._ids = count()

    def fresh(self, blocks: int) -> list[int]:
        return list(islice(self._ids, blocks))


class Drawn(NamedTuple):
    """A lognormal quantity, clipped: many small ones and a long tail, as lengths and pauses mostly are."""

    median: float
    sigma: float
    """Standard deviation of the logarithm: 0.5 varies by two thirds around the median, 1.2 by three times."""
    low: float
    high: float

    def draw(self, source: Source) -> float:
        drawn = source.rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(drawn, self.low), self.high)

    def whole(self, source: Source) -> int:
        return round(self.draw(source))


class Zipf:
    """Draws ranks from 0: the k-th is drawn in proportion to k ** -skew, counted from 1."""

    def __init__(self, number: int, skew: float) -> None:
        self._weights = list(accumulate(rank**-skew for rank in range(1, number + 1)))

    def draw(self, source: Source) -> int:
        return bisect(self._weights, source.rng.random() * self._weights[-1])


class Common(NamedTuple):
    """Texts that prompts open with: system prompts, tool definitions, templates."""

    texts: int
    blocks: tuple[int, int]
    """Each has a length between these, drawn evenly."""
    skew: float = 0.0
    """Of their popularity; see Zipf."""

    def drawing(self, source: Source) -> Callable[[], Sequence[int]]:
        """Makes the texts; every call returns the blocks of one of them."""
        texts = [source.fresh(source.rng.randint(*self.blocks)) for _ in range(self.texts)]
        popularity = Zipf(self.texts, self.skew)
        return lambda: texts[popularity.draw(source)]


NOTHING = Common(1, (0, 0))


class Prompt:
    """A text that only grows."""

    __slots__ = ("_blocks", "length")

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = list(blocks)
        self.length = len(blocks) * BLOCK_TOKENS

    def branch(self) -> Prompt:
        """The same text, to go on differently."""
        twin = Prompt(self._blocks)
        twin.length = self.length
        return twin

    def grow(self, source: Source, tokens: int) -> None:
        """By content that is new."""
        self.length += tokens
        self._blocks += source.fresh(self.length // BLOCK_TOKENS - len(self._blocks))

    def hash_ids(self, source: Source) -> tuple[int, ...]:
        """A partial block's content changes as the prompt grows, so its id is never given again."""
        partial = source.fresh(1) if self.length % BLOCK_TOKENS else ()
        return (*self._blocks, *partial)


Arrivals = Callable[[Source, float, float], Iterator[float]]
"""Given a source, the mean rate a second and the duration: moments in ascending order."""


def poisson(source: Source, rate: float, duration: float) -> Iterator[float]:
    at = source.rng.expovariate(rate)
    while at < duration:
        yield at
        at += source.rng.expovariate(rate)


BURST_EVERY = 60.0
"""Seconds from one burst to the next, on average."""


def bursts(source: Source, rate: float, duration: float, every: float = BURST_EVERY) -> Iterator[float]:
    """Five times the mean rate for a tenth of the time, in bursts of half to one and a half times that tenth of `every`
    seconds, and 5/9 of it in between, so that the mean is kept."""
    begin = 0.0
    for mean, factor in cycle(((0.9 * every, 5 / 9), (0.1 * every, 5.0))):
        end = min(begin + mean * source.rng.uniform(0.5, 1.5), duration)
        yield from (begin + at for at in poisson(source, rate * factor, end - begin))
        begin = end
        if begin >= duration:
            return


class Shape(NamedTuple):
    """What one session looks like: a conversation, an agent at work, or a single request. Tokens and seconds."""

    opening: Drawn
    """New tokens of the first turn, after the common text."""
    answer: Drawn
    turns: Drawn = Drawn(1, 0.0, 1, 1)
    turn: Drawn = Drawn(1, 0.0, 1, 1)
    """New tokens of every further turn, beside the last answer."""
    pause: Drawn = Drawn(1, 0.0, 1, 1)
    """From the end of an answer to the next turn: a person thinks, a tool runs."""
    limit: int = 100_000
    """A session ends before its prompt and answer would exceed this."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that begin independently of each other."""

    rate: float
    """Begun a second, on average."""
    shape: Shape
    common: Common = NOTHING
    arrivals: Arrivals = poisson
    adapters: int = 0
    """LoRA adapters of Zipf popularity, of which each session asks for one."""

    def __call__(self, source: Source, duration: float) -> Iterator[Row]:
        text, popularity = self.common.drawing(source), Zipf(self.adapters, 1.0) if self.adapters else None
        for start in self.arrivals(source, self.rate, duration):
            adapter = f"adapter-{popularity.draw(source)}" if popularity else None
            yield from session(self.shape, source, Prompt(text()), start, duration, adapter)


def session(
    shape: Shape, source: Source, prompt: Prompt, at: float, until: float, adapter: str | None = None
) -> Iterator[Row]:
    """Every turn's prompt is all that was said before, answers included as new content, and something new."""
    new = shape.opening.whole(source)
    for _ in range(shape.turns.whole(source)):
        prompt.grow(source, new)
        answer = shape.answer.whole(source)
        if at >= until or prompt.length + answer > shape.limit:
            return
        yield Row(milliseconds(at), prompt.length, answer, prompt.hash_ids(source), adapter=adapter)
        at += answer * SECONDS_PER_TOKEN + shape.pause.draw(source)
        new = answer + shape.turn.whole(source)


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
