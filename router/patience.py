"""How long workers may leave requests waiting, and when a worker that gives no sign of life counts as sick.

One look at all requests a second, not timers: a request costs two changes of a set, and a piece of an answer nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Final, NamedTuple

from router.exchange import Exchange
from router.fleet import Worker
from router.outcome import Silence

INTERVAL: Final = 1.0
"""Seconds between two looks."""
LATE: Final = 2.0
"""So many times `INTERVAL` after the last one a look may find silent whom only this process did not hear."""


class Timeouts(NamedTuple):
    """In seconds; None: none."""

    first_byte: float | None
    """For a streamed answer to begin."""
    idle: float | None
    """Between two pieces of an answer."""
    request: float | None
    """For a request in all."""
    stall: float | None
    """In which a worker that owes streams something must send a piece of any."""


class Patience:
    """`now` is in seconds on one steady clock."""

    def __init__(
        self, timeouts: Timeouts, trip: Callable[[Worker, str, float], None], under_way: Collection[Exchange]
    ) -> None:
        """`trip` is told of a sick worker, with the reason, and when. `under_way` changes as requests come and go."""
        self._timeouts = timeouts
        self._trip = trip
        self._under_way = under_way
        self._signs: dict[Worker, tuple[float, int]] = {}
        """When each worker that owes something gave its last sign of life, or began to owe; and how many answers it
        had ended by then."""

    def look(self, now: float) -> None:
        looks = [(exchange, exchange.look(now)) for exchange in self._under_way]
        sick = self._sick([silence for exchange, silence in looks if silence and _tells(exchange, silence)], now)
        for exchange, silence in looks:
            self._judge(exchange, silence, sick, now)

    def _judge(self, exchange: Exchange, silence: Silence | None, sick: set[Worker], now: float) -> None:
        timeouts = self._timeouts
        if timeouts.request is not None and now - exchange.began > timeouts.request:
            exchange.expire(timeouts.request)
        elif silence and silence.worker in sick:
            exchange.time_out("has sent nothing to anybody for too long")
        elif silence:
            limit = self._limit(exchange, silence)
            if limit is not None and now - silence.since > limit:
                exchange.time_out(f"sent nothing for {limit:g} s")

    def _limit(self, exchange: Exchange, silence: Silence) -> float | None:
        if silence.owed == "rest":
            return self._timeouts.idle
        return self._timeouts.first_byte if silence.owed == "beginning" and exchange.streamed else None

    def _sick(self, silences: list[Silence], now: float) -> set[Worker]:
        """Whose streams and prefills all stand still."""
        moved = {silence.worker for silence in silences if silence.moved}
        signs: dict[Worker, tuple[float, int]] = {}
        # The one that has waited for the longest says since when a worker owes, in whatever order they come here.
        for silence in sorted(silences, key=attrgetter("since"), reverse=True):
            worker, ended = silence.worker, silence.worker.pool.ended
            at, had = self._signs.get(worker, (silence.since, ended))
            signs[worker] = (now if worker in moved or had != ended else at), ended
        self._signs = signs
        limit = self._timeouts.stall
        sick = {worker for worker, (at, _) in signs.items() if limit is not None and now - at > limit}
        for worker in sick:
            del signs[worker]
            self._trip(worker, f"its answers have stood still for {limit:g} s", now)
        return sick


def _tells(exchange: Exchange, silence: Silence) -> bool:
    """Whether it tells of the worker: an answer that comes whole does not before it has come, however many tokens it
    takes, but for the one of a prefill."""
    return exchange.streamed or silence.owed == "prefill"
