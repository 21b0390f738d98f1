"""Whether the event loops of several router processes turn. The kernel goes on giving connections to a process that
stands still, and nobody would answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

INTERVAL: Final = 1.0
"""Seconds between two beats, and between two looks at them."""
STILL: Final = 20
"""Looks in a row that see no beat, after which a process stands still: more than a busy machine makes one wait."""

Beats = npt.NDArray[np.int64]
"""By process, in memory that they share."""


class Heartbeat:
    """Counts the beats of the process `own`."""

    def __init__(self, beats: Beats, own: int) -> None:
        self._beats = beats
        self._own = own

    def start(self, call_later: Callable[..., object]) -> None:
        """Beat from now on. `call_later`: as of an event loop."""
        self._beats[self._own] += 1
        call_later(INTERVAL, self.start, call_later)


class Standstill:
    """As the parent sees it. It counts looks, not seconds: if the whole machine stood still, so did the parent."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._seen: dict[int, tuple[int, int]] = {}
        """By process: its beats at the latest look, and at how many looks in a row they had not changed."""

    def found(self, processes: Iterable[int]) -> list[int]:
        """Those of `processes` that have not beaten for exactly `STILL` looks. To be called every `INTERVAL`."""
        seen = {}
        for number in processes:
            beats, (last, missed) = int(self._beats[number]), self._seen.get(number, (-1, 0))
            seen[number] = beats, missed + 1 if beats == last else 0
        self._seen = seen
        return [number for number, (_, missed) in seen.items() if missed == STILL]
