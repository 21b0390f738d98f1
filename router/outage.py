"""Requests for which no worker is up, held until one is: while the only one restarts, or the first one starts."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from router.scheduling.limits import Limits


class Waiting(Protocol):
    @property
    def arrived(self) -> float:
        """When it came, in seconds on a steady clock."""

    @property
    def tenant(self) -> str: ...

    def try_again(self) -> bool:
        """Route it, if a worker is up that can take it; returns whether one is."""

    def give_up(self) -> None:
        """Answer that no worker is up."""


class Outage:
    """`now`: seconds on a steady clock."""

    def __init__(self, patience: float, limits: Limits) -> None:
        """`patience`: seconds from a request's arrival for which it may be held. `limits`: how many at a time, as of
        the queue."""
        self._patience = patience
        self._limits = limits
        self._held: dict[Waiting, None] = {}
        """In the order in which they came here."""
        self._tenants: Counter[str] = Counter()
        """How many requests each tenant has among them."""

    @property
    def held(self) -> int:
        """How many requests."""
        return len(self._held)

    def takes(self, waiting: Waiting, now: float) -> bool:
        """Whether it may be held."""
        return now - waiting.arrived < self._patience and (self._has_room or self._displaced_by(waiting) is not None)

    def hold(self, waiting: Waiting) -> None:
        displaced = None if self._has_room else self._displaced_by(waiting)
        if displaced:
            self.withdraw(displaced)
            displaced.give_up()
        self._keep(waiting)

    def _keep(self, waiting: Waiting) -> None:
        self._held[waiting] = None
        self._tenants[waiting.tenant] += 1

    @property
    def _has_room(self) -> bool:
        most = self._limits.max_queue
        return most is None or len(self._held) < most

    def _displaced_by(self, waiting: Waiting) -> Waiting | None:
        """The last request of the tenant with the most, if that of `waiting` would have fewer even with it, as when the
        queue is full. None: there is none."""
        tenant, most = max(self._tenants.items(), key=lambda item: item[1], default=("", 0))
        if most <= self._tenants[waiting.tenant] + 1:
            return None
        return next(each for each in reversed(self._held) if each.tenant == tenant)

    def withdraw(self, waiting: Waiting) -> None:
        """The request is no longer to be routed."""
        if waiting not in self._held:
            return
        del self._held[waiting]
        self._tenants[waiting.tenant] -= 1
        if not self._tenants[waiting.tenant]:
            del self._tenants[waiting.tenant]

    def tick(self, now: float) -> None:
        """To be called once a second."""
        for waiting in list(self._held):
            if waiting not in self._held:  # what was done for another may have withdrawn it
                continue
            self.withdraw(waiting)  # first, as it may have to wait again at once
            if waiting.try_again():
                continue
            if now - waiting.arrived < self._patience:
                self._keep(waiting)
            else:
                waiting.give_up()
