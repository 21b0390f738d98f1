"""A split request in the simulated fleet: prefill on one worker, decode on another, and the KV transfer between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engines.sim.request import Request
from indexer.types import WorkerRank
from router.scheduling.booking import Booking
from router.scheduling.decision import Decision

if TYPE_CHECKING:
    from router.simulation.arrival import Arrival
    from router.simulation.fleet import VirtualFleet

HOP: Final = 0.001
"""Seconds from the router to a worker or back: a proxy on a local network."""


class Parts:
    """A split request; as `rank.Sink` it receives the one token of the prefill."""

    def __init__(self, fleet: VirtualFleet, arrival: Arrival, decision: Decision, booking: Booking) -> None:
        self._fleet = fleet
        self._arrival = arrival
        self._decision = decision
        self._booking = booking
        self._over = False
        self._prefilled: float | None = None
        self._fetched: float | None = None
        """When the transfer could be finished, provided that the prefill is."""
        self._decode_rank: WorkerRank | None = None
        self._decode: Request | None = None
        self._request = request = arrival.request()
        request.max_tokens, request.keep = 1, True
        arrival.prefilling(request)
        self._on_its_way = [fleet.deliver(decision.rank, request, arrival, self)]
        if fleet.settings.push:
            self._send_decode()

    def decodes_at(self, rank: WorkerRank) -> bool:
        return self._decode_rank == rank

    # -- rank.Sink

    def on_token(self, position: int, finished: bool) -> None:  # noqa: ARG002 -- there is one
        if self._over:
            self._let_go()
            return
        self._prefilled = self._fleet.timeline.now()
        self._fleet.timeline.call_later(HOP, self._heard)
        if self._fetched is not None:
            self._finish_transfer(self._fetched)

    def _heard(self) -> None:
        if self._over:
            return
        now = self._fleet.timeline.now()
        self._booking.first_token(now)
        self._booking.release(now)
        if self._decode is None:
            self._send_decode()

    def _send_decode(self) -> None:
        fleet, arrival, decision = self._fleet, self._arrival, self._decision
        split = fleet.split_of(decision.rank)
        if split is None:
            arrival.lose(decision.rank)
            return
        decision = decision.at(split, split.prefills.ranks.index(decision.rank))
        now, done = fleet.timeline.now(), self._prefilled is not None
        onward = fleet.scheduler.select_decode(decision, arrival.matches(), now, done)
        booking = fleet.scheduler.reserve_decode(decision.rank, onward, arrival.prompt_tokens, now, streamed=True)
        if done:
            booking.prefilled(now)
        self._decode_rank, self._decode = onward.rank, arrival.request()
        self._decode.remote = True
        arrival.decoding(onward.rank, booking)
        fleet.fetching[self._decode] = self
        self._on_its_way.append(fleet.deliver(onward.rank, self._decode, arrival, arrival))

    # -- the transfer

    def fetch(self, tokens: int) -> None:
        """Called when the decode worker has allocated blocks for the prompt and needs the KV of `tokens`."""
        if self._over:
            return
        now = self._fleet.timeline.now()
        if tokens == 0:
            self._let_go()
            return
        self._fetched = now + self._fleet.settings.transfer_seconds(tokens)
        if self._prefilled is not None:
            self._finish_transfer(self._fetched)

    def _finish_transfer(self, at: float) -> None:
        timeline = self._fleet.timeline
        timeline.call_at(max(at, timeline.now()) + self._fleet.settings.transfer_base_s, self._loaded)

    def _loaded(self) -> None:
        self._let_go()
        worker = self._fleet.workers.get(self._decode_rank) if self._decode_rank else None
        if worker and self._decode and not self._over:
            worker.loaded(self._decode.request_id)

    def _let_go(self) -> None:
        worker = self._fleet.workers.get(self._decision.rank)
        if worker:
            worker.let_go(self._request.request_id)
        self._fleet.leave(self._decision.rank, self._arrival)

    def end(self) -> None:
        """Ends the request, answered or not, and frees what both workers hold for it."""
        self._over = True
        fleet, decode = self._fleet, self._decode
        for half in self._on_its_way:
            half.cancel()
        self._booking.release(fleet.timeline.now())
        prefiller = fleet.workers.get(self._decision.rank)
        if prefiller:
            prefiller.abort(self._request.request_id)
        self._let_go()
        if decode and self._decode_rank:
            fleet.fetching.pop(decode, None)
            fleet.leave(self._decode_rank, self._arrival)
            worker = fleet.workers.get(self._decode_rank)
            if worker:
                worker.abort(decode.request_id)
