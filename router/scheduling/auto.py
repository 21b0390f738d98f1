"""Policy `auto`: predicted seconds of this request and of the requests that it delays; and late binding.

The cost of a rank is the queue that a request meets there, its own prefill, the wait for memory, and what it does to
others. A prefill delays all requests that come while the rank is busy: in a queue at utilisation ρ, each second of work
makes others wait ρ/(1 − ρ) seconds in all (the busy period of an M/G/1 queue is 1/(1 − ρ) times the work that began
it). Hence the weight on a request's own work: the fuller the fleet, the more a cached prefix is worth. It delays those
that are held already, too. The weight is less on a rank that was less busy than the others. Each second of prefill
also stalls the streams of the same rank.

Late binding: a request is sent only while its rank has room for its KV and little prefill queued. Otherwise it stays in
the router's queue, where it can still be re-ordered and re-assigned; an engine's own queue is first come, first served.

The cost of one request does not show what a copy of its prefix is worth to later ones: `copies` does.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from router.scheduling.auto_costs import auto_costs
from router.scheduling.candidates import Seconds
from router.scheduling.copies import Copies
from router.scheduling.decision import Cost, Situation

_BUSY_MEMORY: Final = 2.0
"""Seconds over which the fleet's utilisation is averaged. It has to be short enough to notice a cold start, when each
prefix should be computed in few places: with 10 s that took four times as long as following prefixes only."""
_BUSY_EVERY: Final = 0.05
"""Seconds between two samples of the utilisation."""
_BUSY_MOST: Final = 0.3
"""Most seconds that one sample stands for, however long ago the last one was: a fleet that was idle for a minute must
not count as idle for two more seconds when a burst comes. Somewhat longer than a long shared prefix takes, so that idle
ranks compute it too (docs/adr/0005-auto-policy.md compares 0.2 to 0.4)."""
_MOST_DELAY: Final = 8.0
"""Upper limit of ρ/(1 − ρ): the estimate of ρ is too coarse near 1."""
_MOST_LOAD_DELAY: Final = 4.0
"""The same for loads from a store."""
_BEHIND: Final = 0.5
"""Share of the requests held for each rank that a request's own work counts as delaying: those that come behind it. A
queue shows an overload, in which work delays more than ρ tells (compared in docs/adr/0005-auto-policy.md)."""
_MOST_BEHIND: Final = 30.0
"""Upper limit of that number: with more held, nothing but the overlap would count."""


class Auto:
    def __init__(self) -> None:
        self._prefills, self._loads = Utilisation(), Utilisation()
        self._copies = Copies()

    def cost(self, situation: Situation) -> Cost:
        ranks = len(situation.candidates)
        values, may_go = np.empty(ranks), np.empty(ranks, np.bool_)
        least, other, rent = auto_costs(
            situation.counts,
            situation.estimates,
            situation.prompt_tokens,
            1 + self.delay(situation) + _behind(situation),
            self.load_delay(situation),
            situation.residence_seconds,
            _growth(situation),
            values,
            may_go,
        )
        if rent > 0.0:
            self._rent_or_buy(situation, values, least, other, rent)
        return Cost(values, situation.whole_prefill_seconds, may_go)

    def _rent_or_buy(self, situation: Situation, values: Seconds, least: int, other: int, rent: float) -> None:
        """Make the candidate at `other` the cheapest in `values` once the rent paid for the prefix makes up for its
        higher cost, unless the request would then miss its objective; until then pay `rent`. See `copies`."""
        prefix = situation.prefix_of(least)
        if prefix is None:
            return
        now, copies = situation.now, self._copies
        paid = copies.paid(prefix, now)
        if paid > 0.0 and values[other] - paid <= values[least] and _ttft(situation, other) <= situation.limit:
            values[other] = math.nextafter(values[least], -math.inf)
            copies.buy(prefix, now)
        else:
            copies.pay(prefix, rent, now)

    def delay(self, situation: Situation) -> float:
        """Seconds that others wait for each second of new work: ρ/(1 − ρ) of prefills."""
        if self._prefills.due(situation.now):
            self._prefills.see(situation.busy, situation.now)
        return self._prefills.delay

    def load_delay(self, situation: Situation) -> float:
        """The same for loads from a store, which queue up at a rank too."""
        if self._loads.due(situation.now):
            self._loads.see(situation.loading, situation.now)
        return min(_MOST_LOAD_DELAY, self._loads.delay)


def _growth(situation: Situation) -> float:
    """Tokens that each running request is expected to generate yet, as far as its memory has to be kept free; 0: it
    need not be. Where memory runs out, an engine preempts the requests that came last, whose first token is late then.
    So this counts where there is an objective for the first token. Without one, filling memory to the brim gives
    earlier first tokens, on average (compared in docs/adr/0005-auto-policy.md)."""
    return situation.answer_tokens if situation.limit < math.inf else 0.0


def _behind(situation: Situation) -> float:
    """How many held requests each second of work at a rank makes wait a second longer."""
    return min(_MOST_BEHIND, _BEHIND * situation.held_requests)


def _ttft(situation: Situation, position: int) -> float:
    """Predicted seconds to the first token on the candidate at `position`."""
    before = situation.queue_seconds[position] + situation.held_seconds[position] + situation.load_seconds[position]
    return float(before + situation.prefill_seconds[position] + situation.step_seconds[position])


class Utilisation:
    """ρ as an exponential moving average over the sampled time; `now` is in seconds."""

    def __init__(self) -> None:
        self._busy = self._sampled = 0.0
        """Seconds that ranks were busy, and seconds that samples stand for, both with exponential decay."""
        self._at = -math.inf
        """When the last sample was taken."""

    def due(self, now: float) -> bool:
        return now - self._at >= _BUSY_EVERY

    def see(self, share: float, now: float) -> None:
        """Take a sample: this share of the ranks (0–1) is busy now."""
        passed, self._at = now - self._at, now
        kept, seconds = math.exp(-passed / _BUSY_MEMORY), min(passed, _BUSY_MOST)
        self._busy = kept * self._busy + seconds * share
        self._sampled = kept * self._sampled + seconds

    @property
    def delay(self) -> float:
        """ρ/(1 − ρ), limited."""
        return min(_MOST_DELAY, self._busy / max(1e-9, self._sampled - self._busy))
