"""Changes of the fleet during a run, as written on the command line: `T:slow:INDEX=FACTOR` and the like."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, cast, get_args

from router.simulation.fleet import VirtualFleet

Kind = Literal["slow", "kill", "join", "drain"]


SLOWEST: Final = 1e4
"""Greatest factor: a step takes minutes then, and with far greater ones an answer would never end."""


class Change(NamedTuple):
    at: float
    """Seconds from the beginning of the trace."""
    kind: Kind
    number: int
    """The index of a worker; of `join`, how many workers join."""
    factor: float = 1.0
    """Of `slow`: see `VirtualFleet.slow_down`."""

    def make(self, fleet: VirtualFleet) -> None:
        match self.kind:
            case "slow":
                fleet.slow_down(self.number, self.factor)
            case "kill":
                fleet.kill(self.number)
            case "drain":
                fleet.drain(self.number)
            case "join":
                fleet.join(self.number)


def parse_change(text: str) -> Change:
    """Parses a change. Raises ValueError."""
    at, kind, what = text.split(":")
    number, equals, factor = what.partition("=")
    if kind not in get_args(Kind) or bool(equals) != (kind == "slow"):
        raise ValueError(text)
    change = Change(float(at), cast("Kind", kind), int(number), float(factor or 1))
    least = 1 if kind == "join" else 0
    if not 0 <= change.at < math.inf or change.number < least or not 0 < change.factor <= SLOWEST:
        raise ValueError(text)
    return change


def parse_slow(text: str) -> tuple[int, float]:
    """Parses INDEX=FACTOR. Raises ValueError."""
    index, _, factor = text.partition("=")
    found = int(index), float(factor)
    if found[0] < 0 or not 0 < found[1] <= SLOWEST:
        raise ValueError(text)
    return found


def plan_changes(fleet: VirtualFleet, changes: Iterable[Change]) -> None:
    for change in changes:
        fleet.timeline.call_at(change.at, change.make, fleet)


def unknown_worker(workers: int, changes: Iterable[Change]) -> int | None:
    """A worker that some change names before it exists, if there is one. Changes of the same moment are made in the
    order given."""
    for change in sorted(changes, key=lambda change: change.at):
        if change.kind == "join":
            workers += change.number
        elif change.number >= workers:
            return change.number
    return None
