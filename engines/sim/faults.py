"""Ways for a worker to misbehave on demand: armed for the next requests, or a slowdown until cleared."""

from __future__ import annotations

from collections import Counter, deque
from typing import Annotated, Literal

import msgspec

TRANSFER_FAULTS = frozenset({"transfer_fails", "transfer_hangs"})
REFUSALS = {"error429": 429, "error500": 500, "error503": 503}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /sim/fault.

    `error429`, `error500`, `error503`: that status. `drop_before_first_byte`: the connection is cut.
    `break_after_tokens`: it is cut after `after` tokens. `hang`: no answer at all. Each strikes the next `count`
    generation requests. `transfer_fails`, `transfer_hangs`: the KV of the next `count` prompts that this worker takes
    from another never comes; with the first the request fails. `slow`: every step takes `factor` times as long, until
    cleared.
    """

    kind: Literal[
        "error429",
        "error500",
        "error503",
        "drop_before_first_byte",
        "break_after_tokens",
        "hang",
        "slow",
        "transfer_fails",
        "transfer_hangs",
    ]
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Faults:
    """The faults armed at one worker, first in, first out."""

    def __init__(self) -> None:
        self._armed: deque[Fault] = deque()
        self._transfers: deque[Fault] = deque()
        """For transfers of KV. Both: `count` is how many requests it is still to strike."""
        self.struck: Counter[str] = Counter()
        """How many of each kind have found their request."""

    def arm(self, fault: Fault) -> None:
        (self._transfers if fault.kind in TRANSFER_FAULTS else self._armed).append(fault)

    def take(self) -> Fault | None:
        """The fault for the request that just came."""
        return self._take(self._armed)

    def take_transfer(self) -> str | None:
        """The kind of fault for the transfer that just begins."""
        fault = self._take(self._transfers)
        return fault.kind if fault else None

    def _take(self, queue: deque[Fault]) -> Fault | None:
        if not queue:
            return None
        fault = queue.popleft()
        if fault.count > 1:
            queue.appendleft(msgspec.structs.replace(fault, count=fault.count - 1))
        self.struck[fault.kind] += 1
        return fault

    @property
    def armed(self) -> int:
        """That wait for their request."""
        return sum(fault.count for fault in (*self._armed, *self._transfers))

    def clear(self) -> None:
        self._armed.clear()
        self._transfers.clear()


read_fault = msgspec.json.Decoder(Fault).decode
