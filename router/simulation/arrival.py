"""A request in the simulated router, from its arrival to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from engines.sim.request import Request
from indexer.matches import Matches
from indexer.types import WorkerRank
from router.ab.trace import Row
from router.proxy.failures import MOST_HARMED
from router.scheduling.booking import Booking
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Decision, Policy
from router.scheduling.others import ALONE
from router.scheduling.waiting import AnyRefusal
from router.simulation.parts import HOP, Parts
from router.simulation.prompts import make_request, sequence_hashes

if TYPE_CHECKING:
    from router.simulation.fleet import VirtualFleet

BOOK_EVERY: Final = 16
"""Tokens of a stream that are added to the worker's load at a time."""

Fate = Literal["answered", "refused", "failed"]


class Sample(NamedTuple):
    """What became of a request; times in seconds. `first` is None where there was no first token."""

    number: int
    """The index of its row in the trace."""
    arrived: float
    first: float | None
    last: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens in its worker's own cache."""
    output_tokens: int
    worker: int
    """The worker that it was last sent to (to prefill, if it was split), or −1."""
    fate: Fate = "answered"
    stored_tokens: int = 0
    """Prompt tokens loaded from the store."""

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.first is None or self.output_tokens < 2 or self.fate == "failed":
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from its arrival to its last token."""
        return self.last - self.arrived


class Arrival:
    """A request. It is a `queue.Waiting` until it is sent, and a `rank.Sink` afterwards."""

    def __init__(self, fleet: VirtualFleet, index: int, row: Row) -> None:
        self._fleet = fleet
        self._index = index
        self._row = row
        self._hashes = sequence_hashes(row, fleet.settings.block_size)
        self.prompt_tokens = row.input_length
        self.adapter = row.adapter
        self.arrived = fleet.timeline.now()
        self.priority = 0
        self.tenant = ""
        self.pinned = False
        self.ttft_slo: float | None = None
        self.streamed = True
        self.others = ALONE
        self.policy: Policy | None = None
        self._booking: Booking | None = None
        self._request: Request | None = None
        self._worker = -1
        self._first: float | None = None
        self._failures = 0
        self._parts: Parts | None = None
        """The request's two parts, if it is split."""
        self._ranks: list[WorkerRank] = []
        """Where it was sent, if it is not."""
        self._loaded = 0
        """Tokens loaded from the store."""
        self._looked_up: tuple[int | None, int] = None, 0
        """The last look-up in the store: `SharedStore.changes` at that time, and the tokens found."""
        self._block_hashes: list[int] = self._hashes.tolist()

    # -- queue.Waiting

    def candidates(self) -> Candidates:
        return self._fleet.candidates

    def matches(self) -> Matches:
        return self._fleet.matches(self._hashes)

    @property
    def stored_tokens(self) -> int:
        """Prompt tokens that the store has now; looked up again only if the store may have changed."""
        shared = self._fleet.shared
        if not shared or not self._fleet.settings.store_credit:
            return 0
        changes = shared.changes
        if changes is None or changes != self._looked_up[0]:
            self._looked_up = changes, shared.tokens(self._block_hashes)
        return self._looked_up[1]

    def send(self, decision: Decision, booking: Booking) -> None:
        fleet = self._fleet
        self._booking = booking
        fleet.expect(decision.rank, self._hashes)
        self._worker = fleet.numbers[decision.rank]
        if decision.split:
            self._parts = Parts(fleet, self, decision, booking)
            return
        self._request = self.request()
        self._ranks = [decision.rank]
        fleet.deliver(decision.rank, self._request, self, self)

    def request(self) -> Request:
        """A new request to an engine, as the client made it."""
        remote = self._fleet.below is not None
        return make_request(self._index, self._failures, self._row, self._block_hashes, remote=remote)

    def prefilling(self, request: Request) -> None:
        """Says that `request` computes the prompt: the cached tokens reported are those of its worker."""
        self._request = request

    def decoding(self, rank: WorkerRank, booking: Booking) -> None:
        """Says that the worker `rank` decodes."""
        self._booking = booking
        self._fleet.expect(rank, self._hashes)

    def refuse(self, refusal: AnyRefusal) -> None:  # noqa: ARG002 -- a Waiting
        self._end("refused")

    def no_candidates(self) -> None:
        self._end("failed")

    def fail(self, error: Exception) -> None:
        raise error

    # -- rank.Sink

    def on_token(self, position: int, finished: bool) -> None:
        if position == 0 or finished or position % BOOK_EVERY == 0:
            self._fleet.timeline.call_later(HOP, self._heard, position, finished)

    def _heard(self, position: int, finished: bool) -> None:
        now, booking = self._fleet.timeline.now(), self._booking
        if booking is None:
            return
        if position == 0:
            self._first = now
            booking.first_token(now)
        elif position % BOOK_EVERY == 0:
            booking.generated(BOOK_EVERY, now)
        if finished:
            self._end("answered")

    def lose(self, rank: WorkerRank) -> None:
        """Handles the loss of a worker: the request is sent to another, once, if it had no first token yet."""
        if self._parts and self._first is not None and not self._parts.decodes_at(rank):
            return  # the lost worker only prefilled, and was done with it
        self._drop()
        self._failures += 1
        if self._first is None and self._failures <= MOST_HARMED:
            self._fleet.queue.submit(self)
        else:
            self._end("failed")

    def _drop(self) -> None:
        """Gives up the current attempt, if there is one: workers and books keep nothing of it."""
        now, parts, ranks = self._fleet.timeline.now(), self._parts, self._ranks
        self._parts, self._ranks = None, []
        if parts:
            parts.end()
        if self._fleet.shared and self._request:
            self._loaded = self._fleet.shared.loaded_tokens.pop(self._request, 0)
        for rank in ranks:
            self._fleet.leave(rank, self)
        if self._booking is not None:
            self._booking.release(now)
            self._booking = None

    def _end(self, fate: Fate) -> None:
        now, row = self._fleet.timeline.now(), self._row
        self._drop()
        cached = self._request.cached_tokens if self._request else 0
        first, worker = self._first, self._worker
        sizes = row.input_length, cached, row.output_length
        self._fleet.end(Sample(self._index, self.arrived, first, now, *sizes, worker, fate, self._loaded))
