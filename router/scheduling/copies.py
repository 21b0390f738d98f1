"""When a prefix that many prompts begin with is computed once more: rent or buy.

Prompts go to whoever holds what they begin with, while somebody who lacks it may stand idle. What each loses by that is
a rent; what the next would lose if it were computed anew there is the price of a copy. Once as much rent was paid for a
prefix as a copy costs, one is bought: together that is at most twice what it would cost to know beforehand how often
the prefix will come again (ski rental: Karlin, Manasse, Rudolph, Sleator 1988).

A prefix is named by where that which anybody holds of a prompt ends. What a conversation holds is longer each time, so
that its name comes once; the name of a prefix that many share comes again and again. Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, NamedTuple

from indexer.types import SequenceHash

REMEMBERED: Final = 4096
"""Prefixes, some 200 bytes each."""
MEMORY: Final = 60.0
"""Seconds after which a rent counts 1/e: what is asked for too seldom is driven out before it comes again."""


class _Account(NamedTuple):
    rent: float
    now: float


class Copies:
    """Rents and prices in any one unit in which a second of waiting costs about 1; `now` in seconds."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._accounts: OrderedDict[SequenceHash, _Account] = OrderedDict()

    def paid(self, prefix: SequenceHash, now: float) -> float:
        """Rent for it so far."""
        account = self._accounts.get(prefix)
        return account.rent * math.exp((account.now - now) / MEMORY) if account else 0.0

    def pay(self, prefix: SequenceHash, rent: float, now: float) -> None:
        """No more than has passed since it came the last time, and nothing the first time: samples of one prompt come
        all together, and not again."""
        account = self._accounts.get(prefix)
        rent = min(rent, max(0.0, now - account.now)) if account else 0.0
        self._keep(prefix, self.paid(prefix, now) + rent, now)

    def buy(self, prefix: SequenceHash, now: float) -> None:
        """One more copy is made: the next has to be paid for anew."""
        self._keep(prefix, 0.0, now)

    def _keep(self, prefix: SequenceHash, rent: float, now: float) -> None:
        self._accounts[prefix] = _Account(rent, now)
        self._accounts.move_to_end(prefix)
        if len(self._accounts) > self._remembered:
            self._accounts.popitem(last=False)
