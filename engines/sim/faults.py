"""Ways for a worker to misbehave on demand: armed for the next requests, or a slowdown until cleared."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

REFUSALS = {"error500": 500, "error503": 503}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /sim/fault.

    `error500`, `error503`: that status. `drop_before_first_byte`: the connection is cut. `break_after_tokens`: it is
    cut after `after` tokens. `hang`: no answer at all. Each strikes the next `count` generation requests. `slow`: every
    step takes `factor` times as long, until cleared.
    """

    kind: Literal["error500", "error503", "drop_before_first_byte", "break_after_tokens", "hang", "slow"]
    count: int = 1
    after: int = 0
    factor: float = 1.0


class Faults:
    """The faults armed at one worker, first in, first out."""

    def __init__(self) -> None:
        self._armed: deque[Fault] = deque()

    def arm(self, fault: Fault) -> None:
        self._armed.extend([fault] * fault.count)

    def take(self) -> Fault | None:
        """The fault for the request that just came."""
        return self._armed.popleft() if self._armed else None

    def clear(self) -> None:
        self._armed.clear()


read_fault = msgspec.json.Decoder(Fault).decode
