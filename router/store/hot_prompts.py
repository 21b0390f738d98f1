"""The prefixes that are asked for most, with their tokens, so that they can be sent to a worker or looked up again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from indexer.hashing import SequenceHashes, Tokens
from indexer.types import Namespace, SequenceHash
from router.store.hot_prefixes import HotPrefix, HotPrefixes

MOST_TOKENS: Final = 2_000_000
"""Most tokens that are kept, 12 bytes each at most. Beyond that the prefixes are dropped that were asked for longest
ago."""


class HotPrompt(NamedTuple):
    tokens: Tokens
    chain: SequenceHashes
    namespace: Namespace


class HotPrompts:
    """The hot prefixes of one base model. `now`: seconds on a steady clock."""

    def __init__(self, block_size: int, most_tokens: int = MOST_TOKENS) -> None:
        self._block_size = block_size
        self._room = most_tokens
        self._counts = HotPrefixes()
        self._kept: OrderedDict[SequenceHash, HotPrompt] = OrderedDict()

    def ask(self, tokens: Tokens, chain: SequenceHashes, namespace: Namespace, now: float) -> None:
        """A request with this prompt has come: count it, and keep as much of the prompt as others had before."""
        blocks = self._counts.ask(chain, now)
        if not blocks:
            return
        key = int(chain[blocks - 1])
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._keep(key, HotPrompt(tokens[: blocks * self._block_size].copy(), chain[:blocks].copy(), namespace))

    def _keep(self, key: SequenceHash, prompt: HotPrompt) -> None:
        self._kept[key] = prompt
        self._room -= len(prompt.tokens)
        while self._room < 0:
            self._room += len(self._kept.popitem(last=False)[1].tokens)

    def hottest(self, number: int, now: float) -> list[HotPrefix]:
        """As `HotPrefixes.hottest`."""
        return self._counts.hottest(number, now)

    def prompts(self, number: int, now: float) -> list[tuple[float, HotPrompt]]:
        """Those of the hottest whose tokens are kept, each with its heat: times asked × tokens."""
        found = ((hot.asked, self._kept.get(hot.sequence_hash)) for hot in self.hottest(number, now))
        return [(asked * len(prompt.tokens), prompt) for asked, prompt in found if prompt]
