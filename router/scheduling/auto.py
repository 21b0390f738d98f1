"""Policy `auto`: predicted seconds, of this request and of those that its choice delays; and late binding.

The cost of a rank is the queue that a request meets there, its own prefill, the wait for memory, and what it does to
others. Prefill delays all that come after it while the rank is busy: in a queue at utilisation ρ each second of work
makes others wait ρ/(1 − ρ) seconds in all (the busy period of an M/G/1 queue is 1/(1 − ρ) times the work that began
it), hence the weight on a request's own work, which a longer overlap makes less: the fuller the fleet, the more a
prefix is worth. Each second of prefill also stalls the streams of the same rank.

Late binding: a request goes out only while its rank has room for its KV, and little prefill before it, or little with
its own. Else it stays in the router's queue, where it can still be re-ordered and re-assigned; an engine's own queue is
first come, first served.

What one request costs does not tell what a copy of its prefix is worth to those that come later: `copies` does.
"""

from __future__ import annotations

import math
from typing import Final

from router.scheduling.auto_costs import auto_costs
from router.scheduling.copies import Copies
from router.scheduling.decision import Cost, Seconds, Situation

_BUSY_MEMORY: Final = 2.0
"""Seconds over which the fleet's utilisation is averaged: short enough to see that all is cold and everything new, when
each prefix should be computed in few places; with 10 it took four times as long as one that follows prefixes only."""
_BUSY_EVERY: Final = 0.05
"""Seconds between two looks at it."""
_BUSY_MOST: Final = 0.3
"""Seconds that one look speaks for, however long ago the last one was: what stood idle for a minute must not count as
idle for two seconds more when all comes at once. Somewhat longer than a long prefix takes, so that one which everybody
shares is computed by whoever is idle (docs/adr/0005-auto-policy.md compares 0.2 to 0.4)."""
_MOST_DELAY: Final = 4.0
"""Limit of ρ/(1 − ρ): near 1 the estimate of ρ is too coarse to say more."""


class Auto:
    def __init__(self) -> None:
        self._prefills, self._loads = Utilisation(), Utilisation()
        self._copies = Copies()

    def cost(self, situation: Situation) -> Cost:
        values, may_go, least, other, rent = auto_costs(
            situation.counts,
            situation.estimates,
            situation.prompt_tokens,
            1 + self.delay(situation),
            self.load_delay(situation),
            situation.residence_seconds,
        )
        if rent > 0.0:
            self._rent_or_buy(situation, values, least, other, rent)
        return Cost(values, situation.whole_prefill_seconds, may_go)

    def _rent_or_buy(self, situation: Situation, values: Seconds, least: int, other: int, rent: float) -> None:
        """Takes what was paid for the prefix from what `other` costs, once that makes it the least."""
        prefix = situation.prefix_of(least)
        if prefix is None:
            return
        now, copies = situation.now, self._copies
        paid = copies.paid(prefix, now)
        if paid > 0.0 and values[other] - paid <= values[least] and _seconds(situation, other) <= situation.limit:
            values[other] = math.nextafter(values[least], -math.inf)
            copies.buy(prefix, now)
        else:
            copies.pay(prefix, rent, now)

    def delay(self, situation: Situation) -> float:
        """Seconds that others wait for each second of new work."""
        if self._prefills.due(situation.now):
            self._prefills.see(situation.busy, situation.now)
        return self._prefills.delay

    def load_delay(self, situation: Situation) -> float:
        """The same for each second of loading from a store: those of one rank come one after the other too."""
        if self._loads.due(situation.now):
            self._loads.see(situation.loading, situation.now)
        return self._loads.delay


def _seconds(situation: Situation, position: int) -> float:
    """To the first token."""
    before = situation.queue_seconds[position] + situation.held_seconds[position] + situation.load_seconds[position]
    return float(before + situation.prefill_seconds[position] + situation.step_seconds[position])


class Utilisation:
    """ρ, averaged over the time that was looked at; `now` is in seconds."""

    def __init__(self) -> None:
        self._busy = self._looked = 0.0
        """Seconds, those long past counting less."""
        self._at = -math.inf

    def due(self, now: float) -> bool:
        return now - self._at >= _BUSY_EVERY

    def see(self, share: float, now: float) -> None:
        """`share` of all ranks have something to do now."""
        passed, self._at = now - self._at, now
        kept, seconds = math.exp(-passed / _BUSY_MEMORY), min(passed, _BUSY_MOST)
        self._busy = kept * self._busy + seconds * share
        self._looked = kept * self._looked + seconds

    @property
    def delay(self) -> float:
        """Seconds that others wait for each second of new work: ρ/(1 − ρ)."""
        return min(_MOST_DELAY, self._busy / max(1e-9, self._looked - self._busy))
