"""Which fault comes next, and when: drawn from a seed (pure)."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Schedule:
    """Poisson: each kind as often a second as its rate says."""

    def __init__(self, rates: Mapping[str, float], draw: random.Random) -> None:
        self._kinds = list(rates)
        self._rates = list(rates.values())
        self._draw = draw

    def next(self) -> tuple[float, str]:
        """(seconds until then, kind)"""
        (kind,) = self._draw.choices(self._kinds, self._rates)
        return self._draw.expovariate(sum(self._rates)), kind
