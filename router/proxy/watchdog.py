"""Ends requests that wait for a worker for too long, and takes workers that have stopped answering out of rotation.

All requests are checked once a second, instead of each having timers: so a request costs two changes of a set, and a
piece of an answer costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import NamedTuple

from router.proxy.exchange import Exchange
from router.proxy.outcome import Silence
from router.workers.worker import Worker


class Timeouts(NamedTuple):
    """In seconds; None: no limit."""

    first_byte: float | None
    """Until a streamed answer begins."""
    idle: float | None
    """Between two pieces of an answer."""
    request: float | None
    """For a whole request."""
    stall: float | None
    """In which a worker with open streams must send a piece of any of them."""


class Watchdog:
    """`now`: seconds on a steady clock."""

    def __init__(
        self, timeouts: Timeouts, trip: Callable[[Worker, str, float], None], under_way: Collection[Exchange]
    ) -> None:
        """`trip` is called with a worker that counts as sick, the reason and the time. `under_way`: the exchanges that
        go on at the moment."""
        self._timeouts = timeouts
        self._trip = trip
        self._under_way = under_way
        self._signs: dict[Worker, tuple[float, int]] = {}
        """Of each worker that has requests to answer: the time of its last sign of life, or since when it has had any;
        and how many answers it had finished by then."""

    def tick(self, now: float) -> None:
        """To be called once a second."""
        found = [(exchange, exchange.silence(now)) for exchange in self._under_way]
        silences = (_evidence(exchange, silence, now) for exchange, silence in found if silence)
        sick = self._sick([silence for silence in silences if silence], now)
        for exchange, silence in found:
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
        """Workers whose streams and prefills have all stood still for too long."""
        moved = {silence.worker for silence in silences if silence.moved}
        signs: dict[Worker, tuple[float, int]] = {}
        # Latest first, so that the request which has waited longest decides since when its worker has owed an answer.
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


def _evidence(exchange: Exchange, silence: Silence, now: float) -> Silence | None:
    """What silence says about the worker. Where an answer is not streamed, which comes only when all its tokens are
    made, it says something only of a prefill, which makes one token, and of a worker that is down, from then on."""
    if exchange.streamed or silence.owed == "prefill":
        return silence
    return None if silence.worker.up else silence._replace(since=now)
