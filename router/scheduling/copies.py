"""When a prefix that many prompts share is computed on one more rank: rent or buy.

Prompts go to ranks that hold their prefix, even while a rank without it is idle. What a request loses by that is its
*rent*. What a request would lose if the prefix were computed anew on the idle rank is the *price* of a copy. Once the
rents paid for a prefix add up to that price, a copy is bought. Rents and price together are at most twice the cost of
the best decision in hindsight (ski rental: Karlin, Manasse, Rudolph, Sleator 1988).

A prefix is named by the last block of a prompt that any rank holds. What is held of a conversation grows with each
turn, so its name comes once; the name of a prefix that many prompts share comes again and again. Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, NamedTuple

from indexer.types import SequenceHash

REMEMBERED: Final = 4096
"""Prefixes, some 200 bytes each."""
MEMORY: Final = 60.0
"""Seconds after which a rent counts 1/e: a prefix that is asked for less often is evicted before it is used again."""


class _Account(NamedTuple):
    rent: float
    """Paid until then."""
    at: float
    """When the prefix came last."""


class Copies:
    """Rents and prices are in the unit of the costs, in which a second of waiting costs about 1; `now` is in
    seconds."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._accounts: OrderedDict[SequenceHash, _Account] = OrderedDict()

    def paid(self, prefix: SequenceHash, now: float) -> float:
        """The rent paid for `prefix` so far."""
        account = self._accounts.get(prefix)
        return account.rent * math.exp((account.at - now) / MEMORY) if account else 0.0

    def pay(self, prefix: SequenceHash, rent: float, now: float) -> None:
        """Add `rent`, but no more than the seconds since the prefix came last, and nothing the first time: several
        samples of one prompt come at once and never again, and do not justify a copy."""
        account = self._accounts.get(prefix)
        rent = min(rent, max(0.0, now - account.at)) if account else 0.0
        self._keep(prefix, self.paid(prefix, now) + rent, now)

    def buy(self, prefix: SequenceHash, now: float) -> None:
        """A copy is made; the next one has to be paid for from 0."""
        self._keep(prefix, 0.0, now)

    def _keep(self, prefix: SequenceHash, rent: float, now: float) -> None:
        self._accounts[prefix] = _Account(rent, now)
        self._accounts.move_to_end(prefix)
        if len(self._accounts) > self._remembered:
            self._accounts.popitem(last=False)
