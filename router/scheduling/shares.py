"""Fair shares: of the tenants with held requests, the one that was served least goes first.

This is the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant is
charged for each of its requests that is sent, in predicted seconds of prefill. A tenant that begins to wait is lifted
to the least counter of those that wait already, so that nobody saves up credit while idle. Counters are forgotten when
nobody waits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from router.scheduling.candidates import Seconds

MOST_IDLE: Final = 1024
"""Most tenants that are remembered while they do not wait: names may come from a header, a new one with each
request."""


class Shares:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._served: list[float] = []
        """Counters, by the tenants' numbers: seconds of prefill."""
        self._waiting: list[int] = []
        """Held requests, likewise."""
        self._free: list[int] = []
        """Numbers of tenants that were forgotten."""

    @property
    def contested(self) -> bool:
        """Whether more than one tenant waits."""
        return sum(1 for waiting in self._waiting if waiting) > 1

    @property
    def served(self) -> Seconds:
        """Counters by the tenants' numbers."""
        return np.array(self._served)

    def only(self, tenant: str) -> bool:
        """Whether no other tenant waits."""
        number = self._numbers.get(tenant)
        return all(each == number for each, waiting in enumerate(self._waiting) if waiting)

    def standing(self, tenant: str) -> tuple[int, Seconds]:
        """The tenant's number, and all counters as they would be if it began to wait."""
        number = self.enter(tenant)
        self.leave(number)
        return number, self.served

    def enter(self, tenant: str) -> int:
        """One more of its requests waits. Returns the tenant's number, which is valid until its last request has
        left."""
        number = self._known(tenant)
        if not self._waiting[number]:
            self._lift(number)
        self._waiting[number] += 1
        return number

    def leave(self, number: int, charge: float = 0.0) -> None:
        """One of its requests waits no more. `charge`: the work of that request, if it was sent."""
        self._served[number] += charge
        self._waiting[number] -= 1

    def pass_by(self, tenant: str, charge: float) -> None:
        """One of its requests was sent without waiting, while others wait."""
        self.leave(self.enter(tenant), charge)

    def number(self, tenant: str) -> int:
        return self._numbers[tenant]

    def waiting(self, tenant: str) -> int:
        """How many of its requests wait."""
        number = self._numbers.get(tenant)
        return 0 if number is None else self._waiting[number]

    def most(self) -> tuple[int, int]:
        """(requests, number) of a tenant with the most held requests. Some tenant must be waiting."""
        most = max(self._waiting)
        return most, self._waiting.index(most)

    def _known(self, tenant: str) -> int:
        number = self._numbers.get(tenant)
        if number is None:
            number = self._free.pop() if self._free else len(self._served)
            if number == len(self._served):
                self._served.append(0.0)
                self._waiting.append(0)
            self._served[number] = 0.0
            self._numbers[tenant] = number
        return number

    def _lift(self, number: int) -> None:
        """Lift its counter to the least of those that wait. Idle tenants whose counters are not above that are
        forgotten, since they would be lifted as well; if the others are too many, those with the least, too."""
        least = min((self._served[each] for each, waiting in enumerate(self._waiting) if waiting), default=None)
        if least is None:
            return
        self._served[number] = max(self._served[number], least)
        idle = [
            (self._served[each], name)
            for name, each in self._numbers.items()
            if not self._waiting[each] and each != number
        ]
        if len(idle) > MOST_IDLE:
            least = max(least, sorted(idle)[MOST_IDLE // 2][0])
        for served, name in idle:
            if served <= least:
                self._free.append(self._numbers.pop(name))
