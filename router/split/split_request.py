"""The state of a request that one worker prefills and another decodes: both legs, their time limits, and which workers
to avoid when one of them fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from engines.disaggregation.answer import Prefilled
from router.http.edited import EditedBody, EditedEvents
from router.http.messages import Request
from router.http.relay import HELD, Relay, Unchunked, relay_for
from router.http.upstream import Head, Receiver
from router.proxy.failures import Failure
from router.proxy.legs import Leg, Pair, Parted
from router.proxy.outcome import Silence
from router.proxy.usage import CACHED, with_cached
from router.scheduling.booking import DecodeBooking
from router.split.late_usage import LateUsage
from router.split.prefill_leg import Owner, PrefillLeg


class SplitRequest:
    __slots__ = ("_clock", "_prefill", "_prefilled_at", "_time_out", "_timer", "_usage", "name", "pair", "parted")

    def __init__(
        self, pair: Pair, request: Request, request_id: bytes, owner: Owner, clock: Callable[[], float]
    ) -> None:
        self.pair = pair
        self.name = b"%s.%016x" % (request_id, pair.number)
        """The request id of both legs, by which engines may match them. It is unique to this pair, whatever ids clients
        choose, since KV may be kept under it."""
        self.parted: Parted | None = None
        """Set once the prompt is computed."""
        self._clock = clock
        self._prefilled_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._time_out: Callable[[float], None] | None = None
        self._usage: LateUsage | None = None
        self._prefill: PrefillLeg | None = PrefillLeg(pair.prefill, request, self.name, owner, clock)

    def start(self) -> None:
        if self._prefill:
            self._prefill.start(self.pair.prefill_timeout)

    def prefilled(self, answer: Prefilled, decode: Leg | None, time_out: Callable[[float], None] | None) -> None:
        """The prefill leg has answered. `decode`: the decode leg, if it is under way already. `time_out`: called when
        the decode worker does not begin to answer in time."""
        now, prefill = self._clock(), self._prefill
        began = prefill.began if prefill else now
        self._prefill = None
        self._prefilled_at = now
        self.parted = Parted(self.pair.prefill.worker.id, now - began, None, answer)
        self._time_out = time_out
        self.watch()
        if decode and isinstance(decode.reservation, DecodeBooking):
            decode.reservation.prefilled(now)

    def silence(self) -> Silence | None:
        """Since when the prefill worker has been silent. None once it has answered, and where both legs are under way:
        each worker may be waiting for the other, so silence does not tell which one is at fault."""
        prefill = self._prefill
        if prefill is None or self.pair.decode:
            return None
        return Silence(prefill.leg.worker, prefill.began, "prefill", moved=False)

    def fail(self, failure: Failure) -> bool:
        """Have the prefill leg fail, if it is still under way; returns whether it was."""
        prefill = self._prefill
        if prefill:
            prefill.fail(failure)
        return prefill is not None

    def watch(self) -> None:
        """From now on the decode worker, or one that replaces it, has `decode_timeout` to begin its answer."""
        limit, time_out = self.pair.decode_timeout, self._time_out
        if time_out and limit is not None:
            self._timer = asyncio.get_running_loop().call_later(limit, time_out, limit)

    def receiver(self, owner: Receiver, settle: Callable[[], None]) -> Receiver:
        """What receives the decode worker's answer on behalf of `owner`; `settle` as in `LateUsage`."""
        if self._prefill is None:
            return owner
        self._usage = LateUsage(owner, settle)
        return self._usage

    @property
    def decoded(self) -> bool:
        """Whether all of the decode worker's answer has come."""
        return self._usage is not None and self._usage.ended

    def release_usage(self) -> None:
        """The prefill worker has answered, or has failed: what was held back for its answer may go on."""
        if self._usage:
            self._usage.release()

    def relay(self, head: Head, http_1_0: bool) -> Relay:
        """Relays the decode worker's answer, with the prefill worker's number of cached tokens put into its usage."""
        if head.is_error or head.framing == "close":
            return relay_for(head, http_1_0)
        if head.events and head.framing == "chunked":
            edited = EditedEvents(CACHED, self._with_cached, sys.maxsize if http_1_0 else HELD)
            return Unchunked(edited) if http_1_0 else edited
        return EditedBody(head, self._with_cached)

    def _with_cached(self, answer: bytes) -> bytes:
        cached = self.parted.answer.cached_tokens if self.parted else None
        return answer if cached is None else with_cached(answer, cached)

    def answers(self, error: bool) -> None:
        """The decode worker has begun to answer. With an `error` that tells nothing of how long the transfer took."""
        self._unwatch()
        if self.parted and not error:
            self.parted = self.parted._replace(transfer=self._clock() - self._prefilled_at)

    def prefill_over(self) -> None:
        """The prefill leg has failed."""
        self._prefill = None

    def cancel(self) -> None:
        """The request is over: drop what is still under way."""
        self._unwatch()
        if self._usage:
            self._usage.drop()
        prefill, self._prefill = self._prefill, None
        if prefill:
            prefill.cancel()

    def _unwatch(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    @property
    def may_move(self) -> bool:
        """Whether another worker may decode instead: the prefill is done, and did not need to know who decodes."""
        return self.parted is not None and self.pair.decode is None

    def others(self, failed: Leg) -> list[frozenset[str]]:
        """Sets of workers to avoid after the decode worker has failed, the most preferred first. Its error may be the
        prefill worker's fault, so both are replaced where there are others."""
        decode, prefill = frozenset((failed.worker.id,)), frozenset((self.pair.prefill.worker.id,))
        return [decode | prefill, decode, prefill]
