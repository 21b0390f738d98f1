"""Looks up how much of a prompt the shared store has: asks its master, and waits no longer than a set time.

The master is asked by `GET /batch_query_keys`, which takes no lease (since Mooncake 0.3.12), and so does not
distort what the store evicts.
If anything goes wrong the answer is that nothing is there, and requests are routed by what the workers hold themselves.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, get_args

from msgspec.structs import replace

from engines.store import Digest, Layout, Verdict, verify
from indexer.hashing import SequenceHashes, Tokens
from indexer.types import Namespace, SequenceHash
from publishers.ending import end_tasks
from router.metrics.tallies import Histogram
from router.store.hot_prompts import HotPrompt
from router.store.master import Query, StoreMaster, Unanswered

KNOWN: Final = 100_000
"""Blocks whose names in the store are remembered; each costs some 200 bytes."""
SEEN_LIFE: Final = 2.0
"""Seconds for which a block that was found counts as still there: the store evicts rarely, and many at once."""
FIRST: Final = 32
"""Blocks that are asked for first: most prompts that share nothing with others are not there, which is so known before
the names of all their blocks are worked out in vain."""
PART: Final = 128
"""Blocks of each further question: the master looks for one part while the names of the next are worked out, and when
the time is over at least the first parts are known."""
AT_ONCE: Final = 4
"""Questions about one prompt under way at a time: a master answers several at once, but a long prompt must not take up
all of it."""
MOST_LISTED: Final = 100_000
"""Keys of a store up to which they are listed. A master lists all, and answers nothing else meanwhile: for half a
second or more with so many (0.3.13, on two cores)."""
LOOKUP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

Outcome = Literal["answered", "late", "failed", "paused", "known"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""How a look-up ended: the master answered in time; later than the request could wait; wrongly or not at all; it was
not asked because of earlier failures; or nothing had to be asked, or could be."""


class _Part(NamedTuple):
    """A part of a prompt that the master was asked about."""

    digests: list[Digest]
    keys: list[tuple[str, ...]]
    """For each block every object that must be there."""
    query: Query


class _Found(NamedTuple):
    blocks: int
    """Leading blocks that are there. If the look-up failed, there may be more."""
    outcome: Outcome


class _Prompt(NamedTuple):
    tokens: Tokens
    chain: list[int]
    """Its sequence hashes."""
    namespace: Namespace


class StoreLookup:
    """Look-ups of one model's prompts."""

    def __init__(
        self,
        master: StoreMaster,
        budget: float,
        keys: Layout,
        clock: Callable[[], float],
        seconds: Histogram,
        lookups: dict[Outcome, int],
    ) -> None:
        """`budget`: seconds that a request waits. `seconds`: records how long look-ups took. `lookups`: counts them,
        by how they ended."""
        self._master = master
        self._budget = budget
        self._keys = keys
        self._clock = clock
        self._names: OrderedDict[int, Digest] = OrderedDict()
        """The engine's digests of blocks, by the router's own sequence hashes."""
        self._seen: OrderedDict[Digest, float] = OrderedDict()
        """When each block was last found, those found last at the end."""
        self._running: set[asyncio.Task[_Found]] = set()
        self.lookups = lookups
        self.agrees: bool | None = None
        """Whether the store's keys are named as look-ups name them; None: there was no key yet to tell it by."""
        self._seconds = seconds

    @property
    def block_size(self) -> int:
        return self._keys.block_size

    def adapt(self, adapter: str, path: str) -> None:
        """The adapter of that name was loaded from `path`."""
        known = self._keys.loras.get(adapter)
        if known == path:
            return
        self._keys = replace(self._keys, loras={**self._keys.loras, adapter: path})
        if known is not None:  # another one had its name
            self._names.clear()

    def keys_of(self, sequence_hash: SequenceHash) -> tuple[str, ...]:
        """The objects of a block that was looked up recently; () for any other."""
        digest = self._names.get(sequence_hash)
        return self._keys.keys(digest) if digest else ()

    def seen(self, sequence_hash: SequenceHash, now: float) -> float | None:
        """Seconds since the block was last found there; None if it was not recently."""
        digest = self._names.get(sequence_hash)
        at = self._seen.get(digest) if digest else None
        return None if at is None else now - at

    async def lookup(self, tokens: Tokens, chain: SequenceHashes, namespace: Namespace) -> int:
        """Leading tokens of the prompt that the store has. `chain`: its sequence hashes in blocks of `block_size`."""
        began = self._clock()
        if self._master.is_left_alone(began):
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
            self.lookups[found.outcome] += 1
            return found.blocks * self.block_size
        self.lookups["late"] += 1
        return self._leading(named, began) * self.block_size  # a part may be known by now

    def _named(self, prompt: _Prompt) -> list[Digest]:
        """The digests of the leading blocks that were worked out before."""
        found, names = [], self._names
        for own in prompt.chain:
            digest = names.get(own)
            if digest is None:
                break
            names.move_to_end(own)
            found.append(digest)
        return found

    def _name(self, prompt: _Prompt, named: list[Digest], upto: int) -> None:
        """Work out the digests that are missing of the prompt's first `upto` blocks; adds none if that is
        impossible."""
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
        """How many leading blocks were found there recently."""
        since, seen = now - SEEN_LIFE, self._seen
        return next((at for at, one in enumerate(digests) if seen.get(one, -math.inf) < since), len(digests))

    async def _ask(self, prompt: _Prompt, named: list[Digest], known: int) -> _Found:
        """Ask for the prompt's blocks after the first `known`, which are known to be there."""
        asked = self._parts(prompt, named, known)
        there, under_way = known, deque(islice(asked, 1))
        if not under_way:  # names that cannot be known: the master was not asked, and may be away
            return _Found(known, "known")
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
            self._master.failed(error, self._clock())
            return _Found(there, "failed")
        finally:
            for part in under_way:
                part.query.drop()
        self._master.answered()
        return _Found(there, "answered")

    def _may_ask(self, under_way: int) -> bool:
        return not under_way or (under_way < AT_ONCE and not self._master.crowded)

    def _parts(self, prompt: _Prompt, named: list[Digest], known: int) -> Iterator[_Part]:
        """Ask about one part of the prompt after the other, in order."""
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
        """How many leading blocks of the part are there; the first that is missing ends the prefix."""
        there = next((at for at, keys in enumerate(part.keys) if not present.issuperset(keys)), len(part.keys))
        if there and self.agrees is None:
            self.agrees = True
        now = self._clock()
        seen = self._seen
        for digest in part.digests[:there]:
            seen[digest] = now
            seen.move_to_end(digest)
        while len(seen) > KNOWN:
            seen.popitem(last=False)
        return there

    async def keys_there(self, prompt: HotPrompt) -> list[str] | None:
        """The keys of the objects that make up the prefix; None if one is missing, or if it is not known whether one
        is."""
        keys = self.keys_of_prompt(prompt)
        try:
            present = await self._master.present(keys)
        except Unanswered:
            return None
        return keys if keys and present.issuperset(keys) else None

    def keys_of_prompt(self, prompt: HotPrompt) -> list[str]:
        """The keys of all objects that make up the prefix; [] if they cannot be known."""
        asked = _Prompt(prompt.tokens, prompt.chain.tolist(), prompt.namespace)
        named = self._named(asked)
        self._name(asked, named, len(asked.chain))
        return [key for digest in named for key in self._keys.keys(digest)]

    async def check(self) -> Verdict:
        """Whether the keys in the store look like those that look-ups will ask for."""
        try:
            held = await self._master.keys_held()
            listed = [] if held > MOST_LISTED else await self._master.some_keys()
        except Unanswered as error:
            self._master.failed(error, self._clock())
            return Verdict(None, f"The store's keys cannot be listed: {error}.")
        self._master.answered()
        if held > MOST_LISTED:
            return Verdict(None, f"The store has {held:,} keys, too many to have them listed while it serves.")
        verdict = verify(listed, self._keys)
        self.agrees = self.agrees if verdict.agrees is None else verdict.agrees
        return verdict

    async def close(self) -> None:
        await end_tasks(self._running)
