"""What lies in the shared store of a prompt: asked of its master, within a budget of time, and never in the way.

The master is asked by `GET /batch_query_keys`, which takes no lease (since Mooncake 0.3.12), and so does not
distort what the store evicts.
Whatever goes wrong, the answer is that nothing is there, and routing goes on by what the workers hold themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, get_args

from engines.store import Digest, Layout, Verdict, verify
from indexer.hashing import SequenceHashes, Tokens
from indexer.types import Namespace, SequenceHash
from publishers.logs import log_event
from router.hot_prompts import HotPrompt
from router.store_master import Query, StoreMaster, Unanswered
from router.tallies import Histogram

logger = logging.getLogger("router.store")

KNOWN: Final = 100_000
"""Blocks whose names are remembered; each costs some 200 bytes."""
SEEN_LIFE: Final = 2.0
"""Seconds for which a block that was there is taken to be there still: the store evicts in bulk, rarely."""
FIRST: Final = 32
"""Blocks that are asked for first: most prompts that begin unlike all others are not there, which is soon known, before
names are worked out that nobody needs."""
PART: Final = 128
"""Blocks that are asked for at once of the rest: the master looks for one part's while the next one's names are worked
out, and what is known of a prompt when its time is over is more than nothing."""
AT_ONCE: Final = 4
"""Such questions of one prompt under way: a master answers several at a time, and long prompts are not to have it all.
"""
FAILURES, PAUSE = 3, 2.0
"""After so many failures in a row nothing is asked for so many seconds."""
LOOKUP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

Outcome = Literal["answered", "late", "failed", "paused", "known"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Of each prompt one: the master answered; not before the request had gone on; not as it should; it is not asked for a
while; nothing was to be asked."""


class _Part(NamedTuple):
    """Of a prompt, that the master was asked for."""

    digests: list[Digest]
    keys: list[tuple[str, ...]]
    """Every object that must be there for each."""
    query: Query


class _Found(NamedTuple):
    blocks: int
    """Leading ones that are there."""
    failed: bool
    """The master did not answer as it should, so that there may be more."""


class _Prompt(NamedTuple):
    tokens: Tokens
    chain: list[int]
    """Its sequence hashes."""
    namespace: Namespace


class StoreLookup:
    """Of one model's prompts."""

    def __init__(
        self,
        master: StoreMaster,
        budget: float,
        keys: Layout,
        clock: Callable[[], float],
        seconds: Histogram,
    ) -> None:
        """`budget`: seconds that a request waits. `seconds`: what lookups took."""
        self._master = master
        self._budget = budget
        self._keys = keys
        self._clock = clock
        self._names: OrderedDict[int, Digest] = OrderedDict()
        """What the engine calls a block, by our own sequence hash."""
        self._seen: dict[Digest, float] = {}
        self._failures = 0
        self._paused_until = 0.0
        self._running: set[asyncio.Task[_Found]] = set()
        self.lookups = dict.fromkeys(OUTCOMES, 0)
        self._seconds = seconds

    @property
    def block_size(self) -> int:
        return self._keys.block_size

    @property
    def healthy(self) -> bool:
        return not self._failures

    def keys_of(self, sequence_hash: SequenceHash) -> tuple[str, ...]:
        """Of a block that was looked up of late; () of any other."""
        digest = self._names.get(sequence_hash)
        return self._keys.keys(digest) if digest else ()

    def seen(self, sequence_hash: SequenceHash, now: float) -> float | None:
        """Seconds since such a block was last there."""
        digest = self._names.get(sequence_hash)
        at = self._seen.get(digest) if digest else None
        return None if at is None else now - at

    async def lookup(self, tokens: Tokens, chain: SequenceHashes, namespace: Namespace) -> int:
        """Leading tokens of the prompt that the store has. `chain`: its sequence hashes in blocks of `block_size`."""
        began = self._clock()
        if began < self._paused_until:
            self.lookups["paused"] += 1
            return 0
        prompt = _Prompt(tokens, chain.tolist(), namespace)
        named = self._named(prompt)
        known = self._leading(named, began)
        if known == len(prompt.chain):
            self.lookups["known"] += 1
            return known * self.block_size
        task = asyncio.ensure_future(self._ask(prompt, named, known))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait((task,), timeout=self._budget)
        self._seconds.observe(self._clock() - began)
        if done:
            found = task.result()
            self.lookups["failed" if found.failed else "answered"] += 1
            return found.blocks * self.block_size
        self.lookups["late"] += 1
        return self._leading(named, began) * self.block_size  # a part may be known by now

    def _named(self, prompt: _Prompt) -> list[Digest]:
        """The leading blocks whose names were worked out before."""
        found, names = [], self._names
        for own in prompt.chain:
            digest = names.get(own)
            if digest is None:
                break
            names.move_to_end(own)
            found.append(digest)
        return found

    def _name(self, prompt: _Prompt, named: list[Digest], upto: int) -> None:
        """Work out the names of what is missing of the prompt's first `upto` blocks; none where that cannot be done."""
        have = len(named)
        if have >= upto:
            return
        rest = prompt.tokens[have * self.block_size : upto * self.block_size]
        new = self._keys.hashes(rest, prompt.namespace, named[-1] if named else None) or []
        self._names.update(zip(prompt.chain[have:upto], new, strict=False))
        named += new
        while len(self._names) > KNOWN:
            self._names.popitem(last=False)

    def _leading(self, digests: Sequence[Digest], now: float) -> int:
        """How many were seen there just now."""
        since, seen = now - SEEN_LIFE, self._seen
        return next((at for at, one in enumerate(digests) if seen.get(one, -math.inf) < since), len(digests))

    async def _ask(self, prompt: _Prompt, named: list[Digest], known: int) -> _Found:
        """Of the prompt's leading blocks `known` are known to be there."""
        asked = self._parts(prompt, named, known)
        there, under_way = known, deque(islice(asked, 1))
        try:
            while under_way:
                part = under_way.popleft()
                found = self._take(part, await part.query.present())
                there += found
                if found < len(part.digests):
                    break
                while self._may_ask(len(under_way)) and (another := next(asked, None)):
                    under_way.append(another)
                    await asyncio.sleep(0)  # names take time that others may need
        except Unanswered as error:
            self._fail(error)
            return _Found(there, failed=True)
        finally:
            for part in under_way:
                part.query.drop()
        self._failures = 0
        return _Found(there, failed=False)

    def _may_ask(self, under_way: int) -> bool:
        return not under_way or (under_way < AT_ONCE and not self._master.crowded)

    def _parts(self, prompt: _Prompt, named: list[Digest], known: int) -> Iterator[_Part]:
        """Ask for one part of the prompt after the other, in its order."""
        begin, end = known, known + FIRST
        while begin < len(prompt.chain):
            self._name(prompt, named, end)
            digests = named[begin:end]
            if not digests:
                return
            keys = [self._keys.keys(digest) for digest in digests]
            yield _Part(digests, keys, self._master.begin([key for each in keys for key in each]))
            begin, end = end, end + PART

    def _take(self, part: _Part, present: set[str]) -> int:
        """How many leading ones are there; the first that is missing ends the prefix."""
        there = next((at for at, keys in enumerate(part.keys) if not present.issuperset(keys)), len(part.keys))
        now = self._clock()
        self._seen.update(dict.fromkeys(part.digests[:there], now))
        if len(self._seen) > KNOWN:
            self._seen = {digest: at for digest, at in self._seen.items() if at >= now - SEEN_LIFE}
        return there

    async def keys_there(self, prompt: HotPrompt) -> list[str] | None:
        """Of the objects that make up the prefix; None when one is missing, or nothing can be known."""
        keys = self.keys_of_prompt(prompt)
        try:
            present = await self._master.present(keys)
        except Unanswered:
            return None
        return keys if keys and present.issuperset(keys) else None

    def keys_of_prompt(self, prompt: HotPrompt) -> list[str]:
        """Of all objects that make up the prefix; [] where they cannot be known."""
        asked = _Prompt(prompt.tokens, prompt.chain.tolist(), prompt.namespace)
        named = self._named(asked)
        self._name(asked, named, len(asked.chain))
        return [key for digest in named for key in self._keys.keys(digest)]

    async def check(self) -> Verdict:
        """Whether the keys that are there look like those that will be asked for."""
        try:
            return verify(await self._master.some_keys(), self._keys)
        except Unanswered as error:
            self._fail(error)
            return Verdict(None, f"The store's keys cannot be listed: {error}.")

    def _fail(self, error: Unanswered) -> None:
        self._failures += 1
        if self._failures % FAILURES == 0:
            self._paused_until = self._clock() + PAUSE
        if self._failures == FAILURES:
            log_event(logger, logging.WARNING, "The store cannot be asked: routing goes on without it", reason=error)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
