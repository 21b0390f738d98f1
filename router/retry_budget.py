"""How many retries are allowed, in proportion to requests: when everything fails, retries would only add to the load.

As Finagle's RetryBudget (https://twitter.github.io/finagle/guide/Clients.html): a share of the requests of the last
seconds, and a small flow beside it so that a quiet router retries too. Where requests take minutes, few of those that a
dead worker had came lately: the share is of those under way then, as Envoy's budget is.
"""

from __future__ import annotations

import math
from typing import Final

LEAST: Final = 10.0
"""Retries a second that are always allowed."""
SECONDS: Final = 10.0
"""After so long a request or a retry counts 1/e."""


class RetryBudget:
    """`now` is in seconds on one steady clock."""

    __slots__ = ("_at", "_new", "_requests", "_retries", "_share")

    def __init__(self, share: float, now: float) -> None:
        """`share` of the requests may be retried."""
        self._share = share
        self._at = now
        self._requests = self._retries = 0.0
        self._new = 0

    def __repr__(self) -> str:
        return f"<RetryBudget: {self._retries:.1f} retries lately>"

    def request(self) -> None:
        self._new += 1

    def has(self, now: float, under_way: int) -> bool:
        """Whether one more retry may be made, with so many requests under way."""
        kept = math.exp((self._at - now) / SECONDS)
        self._at = now
        self._requests = self._requests * kept + self._new
        self._retries *= kept
        self._new = 0
        return self._retries + 1 <= LEAST * SECONDS + self._share * max(self._requests, under_way)

    def take(self) -> None:
        self._retries += 1
