"""Which LoRA adapters each rank runs for this router, and how long another one would wait for a slot.

An engine runs requests for so many adapters at a time (vLLM's `--max-loras`, SGLang's `--max-loras-per-batch`).
Requests for others wait there, and are overtaken, until one of these has nothing more to do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from indexer.events import LoadReport
from indexer.types import RankSet, WorkerRank
from router.scheduling.candidates import Seconds


class Adapters:
    def __init__(self) -> None:
        self._asked: dict[WorkerRank, Counter[str]] = {}
        """By rank: requests that were sent there and have not ended, by adapter, in the order in which they came."""
        self._slots: dict[WorkerRank, int] = {}
        """By rank: adapters that run at a time; only where the engine tells."""

    def on_report(self, report: LoadReport) -> None:
        if report.lora_total_slots:
            self._slots[report.rank] = report.lora_total_slots

    def forget(self, rank: WorkerRank) -> None:
        """Requests in flight there still have to `end`."""
        self._slots.pop(rank, None)

    def begin(self, rank: WorkerRank, adapter: str) -> None:
        """A request for `adapter` is sent to `rank`."""
        self._asked.setdefault(rank, Counter())[adapter] += 1

    def end(self, rank: WorkerRank, adapter: str) -> None:
        """It has ended."""
        asked = self._asked[rank]
        asked[adapter] -= 1
        if not asked[adapter]:
            del asked[adapter]
        if not asked:
            del self._asked[rank]

    def waits(self, ranks: RankSet, adapter: str, residence: float) -> Seconds:
        """Seconds until each of `ranks` would run a request for `adapter`. `residence`: how long a request takes from
        being sent to its end."""
        return np.array([self._wait(rank, adapter, residence) for rank in ranks.ranks])

    def _wait(self, rank: WorkerRank, adapter: str, residence: float) -> float:
        """The first adapters that were asked for have the slots. Each is free when all its requests have ended: of as
        many equal ones, the first after about a share of that time."""
        slots, asked = self._slots.get(rank), self._asked.get(rank)
        if slots is None or asked is None or len(asked) < slots:
            return 0.0
        order = list(asked)
        place = order.index(adapter) if adapter in asked else len(order)
        behind = place - slots + 1
        if behind <= 0:
            return 0.0
        return behind * residence * min(asked[other] for other in order[:slots]) / slots
