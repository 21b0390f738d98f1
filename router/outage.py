"""Requests for which no worker is up, held until one is: while the only one restarts, or the first one starts."""

from __future__ import annotations

from typing import Protocol

from router.scheduling.limits import Limits


class Waiting(Protocol):
    @property
    def arrived(self) -> float:
        """When it came, in seconds on a steady clock."""

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

    @property
    def held(self) -> int:
        """How many requests."""
        return len(self._held)

    def takes(self, waiting: Waiting, now: float) -> bool:
        """Whether it may be held."""
        most = self._limits.max_queue
        return now - waiting.arrived < self._patience and (most is None or len(self._held) < most)

    def hold(self, waiting: Waiting) -> None:
        self._held[waiting] = None

    def withdraw(self, waiting: Waiting) -> None:
        """The request is no longer to be routed."""
        self._held.pop(waiting, None)

    def tick(self, now: float) -> None:
        """To be called once a second."""
        for waiting in list(self._held):
            if waiting not in self._held:  # what was done for another may have withdrawn it
                continue
            self.withdraw(waiting)  # first, as it may have to wait again at once
            if waiting.try_again():
                continue
            if now - waiting.arrived < self._patience:
                self.hold(waiting)
            else:
                waiting.give_up()
