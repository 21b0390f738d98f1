"""What lies in the shared store of a prompt: asked of its master, within a budget of time, and never in the way.

The master is asked by `GET /batch_query_keys`, which takes no lease, and so does not distort what the store evicts.
Whatever goes wrong, the answer is that nothing is there, and routing goes on by what the workers hold themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

import aiohttp
from yarl import URL

from engines.store import Digest, Verdict, query_path, read_keys, read_present, verify
from engines.store.query import ALL_KEYS, lease_path
from engines.store.sglang import SglangLayout
from engines.store.vllm import VllmLayout
from indexer.hashing import SequenceHashes, Tokens
from indexer.types import Namespace, SequenceHash
from publishers.dialogue import read_whole
from publishers.logs import log_event
from router.hot_prompts import HotPrompt
from router.tallies import Histogram

logger = logging.getLogger("router.store")

KNOWN: Final = 100_000
"""Blocks whose names are remembered; each costs some 400 bytes."""
SEEN_LIFE: Final = 2.0
"""Seconds for which a block that was there is taken to be there still: the store evicts in bulk, rarely."""
PATIENCE: Final = 1.0
"""Seconds that the master has in all; a request waits for less, but what comes late serves the next."""
MOST_KEYS: Final = 1024**2
"""Bytes of the list of all keys that are looked at: it may be gigabytes."""
FIRST: Final = 32
"""Blocks that are asked for first: most prompts that begin unlike all others are not there, which is soon known, before
names are worked out that nobody needs."""
FAILURES, PAUSE = 3, 2.0
"""After so many failures in a row nothing is asked for so many seconds."""
LOOKUP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

Outcome = Literal["answered", "late", "failed", "paused", "known"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""The master answered; after the request had gone on; not at all; it is not asked for a while; nothing was to be asked.
"""


class _Prompt(NamedTuple):
    tokens: Tokens
    chain: list[int]
    """Its sequence hashes."""
    namespace: Namespace


class _Block(NamedTuple):
    """What the engine calls a block, and every object that must be there for it."""

    digest: Digest
    keys: tuple[str, ...]


class StoreLookup:
    """Of one model's prompts."""

    def __init__(
        self,
        url: str,
        budget: float,
        keys: VllmLayout | SglangLayout,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        seconds: Histogram,
    ) -> None:
        """`budget`: seconds that a request waits. `seconds`: what lookups took."""
        self._url = url
        self._budget = budget
        self._keys = keys
        self._session = session
        self._clock = clock
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        """By our own sequence hash."""
        self._seen: OrderedDict[Digest, float] = OrderedDict()
        self._failures = 0
        self._paused_until = 0.0
        self._running: set[asyncio.Task[int]] = set()
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
        block = self._blocks.get(sequence_hash)
        return block.keys if block else ()

    def seen(self, sequence_hash: SequenceHash, now: float) -> float | None:
        """Seconds since such a block was last there."""
        block = self._blocks.get(sequence_hash)
        at = self._seen.get(block.digest) if block else None
        return None if at is None else now - at

    async def lookup(self, tokens: Tokens, chain: SequenceHashes, namespace: Namespace) -> int:
        """Leading tokens of the prompt that the store has. `chain`: its sequence hashes in blocks of `block_size`."""
        began = self._clock()
        if began < self._paused_until:
            self.lookups["paused"] += 1
            return 0
        prompt = _Prompt(tokens, chain.tolist(), namespace)
        known = self._leading(self._named(prompt), began)
        if known == len(prompt.chain):
            self.lookups["known"] += 1
            return known * self.block_size
        task = asyncio.ensure_future(self._ask(prompt, known))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait((task,), timeout=self._budget)
        self._seconds.observe(self._clock() - began)
        if done:
            return task.result() * self.block_size
        self.lookups["late"] += 1
        return self._leading(self._named(prompt), began) * self.block_size  # the first few may be known by now

    def _named(self, prompt: _Prompt) -> list[_Block]:
        """The leading blocks whose names were worked out before."""
        found = []
        for own in prompt.chain:
            block = self._blocks.get(own)
            if block is None:
                break
            self._blocks.move_to_end(own)
            found.append(block)
        return found

    def _name(self, prompt: _Prompt, named: list[_Block], upto: int) -> None:
        """Work out the names of what is missing of the prompt's first `upto` blocks; none where that cannot be done."""
        have = len(named)
        if have >= upto:
            return
        rest = prompt.tokens[have * self.block_size : upto * self.block_size]
        digests = self._keys.hashes(rest, prompt.namespace, named[-1].digest if named else None) or []
        new = [_Block(digest, self._keys.keys(digest)) for digest in digests]
        self._blocks.update(zip(prompt.chain[have:upto], new, strict=False))
        named += new
        while len(self._blocks) > KNOWN:
            self._blocks.popitem(last=False)

    def _leading(self, blocks: Sequence[_Block], now: float) -> int:
        """How many were seen there just now."""
        since = now - SEEN_LIFE
        return next((at for at, one in enumerate(blocks) if self._seen.get(one.digest, -1.0) < since), len(blocks))

    async def _ask(self, prompt: _Prompt, known: int) -> int:
        """How many leading blocks are there, of which `known` are known to be: a few are asked for first."""
        named, there, upto = self._named(prompt), known, known + FIRST
        try:
            while there < len(prompt.chain):
                self._name(prompt, named, upto)
                asked = named[there:upto]
                found = await self._present(asked) if asked else 0
                there += found
                if not found or found < len(asked):
                    break
                upto = len(prompt.chain)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._fail(error)
            return there
        self._failures = 0
        self.lookups["answered"] += 1
        return there

    async def _present(self, blocks: Sequence[_Block]) -> int:
        """How many leading ones are there; the first that is missing ends the prefix."""
        present = await self._query([key for block in blocks for key in block.keys])
        there = next((at for at, block in enumerate(blocks) if not present.issuperset(block.keys)), len(blocks))
        self._remember(blocks[:there])
        return there

    async def _query(self, keys: Sequence[str]) -> set[str]:
        path = query_path(keys)
        if path is None:
            return set()
        url = URL(self._url + path, encoded=True)
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(PATIENCE)) as answer:
            if answer.status != 200:
                raise ValueError(f"it answered {answer.status}")
            return read_present(await read_whole(answer))

    async def keys_there(self, prompt: HotPrompt) -> list[str] | None:
        """Of the objects that make up the prefix; None when one is missing, or nothing can be known."""
        asked = _Prompt(prompt.tokens, prompt.chain.tolist(), prompt.namespace)
        named = self._named(asked)
        self._name(asked, named, len(asked.chain))
        keys = [key for block in named for key in block.keys]
        try:
            present = await self._query(keys)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return keys if keys and present.issuperset(keys) else None

    async def renew(self, keys: Iterable[str]) -> int:
        """Take a lease on each object, for which the master does not evict it; returns how many were there."""
        there = 0
        for key in keys:
            url = URL(self._url + lease_path(key), encoded=True)
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(PATIENCE)) as answer:
                there += answer.status == 200
        return there

    async def check(self) -> Verdict:
        """Whether the keys that are there look like those that will be asked for."""
        try:
            url, timeout = self._url + ALL_KEYS, aiohttp.ClientTimeout(PATIENCE)
            async with self._session.get(url, timeout=timeout) as answer:
                listed = await answer.content.read(MOST_KEYS) if answer.status == 200 else b""
            return verify(read_keys(listed.rpartition(b"\n")[0]), self._keys)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Verdict(None, f"The store's keys cannot be listed: {error or type(error).__name__}.")

    def _remember(self, blocks: Sequence[_Block]) -> None:
        now = self._clock()
        for block in blocks:
            self._seen[block.digest] = now
            self._seen.move_to_end(block.digest)
        while len(self._seen) > KNOWN:
            self._seen.popitem(last=False)

    def _fail(self, error: Exception) -> None:
        self.lookups["failed"] += 1
        self._failures += 1
        if self._failures % FAILURES == 0:
            self._paused_until = self._clock() + PAUSE
        if self._failures == FAILURES:
            reason = str(error) or type(error).__name__
            log_event(logger, logging.WARNING, "The store cannot be asked: routing goes on without it", reason=reason)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
