"""The metrics aggregator: what each rank is doing, from its latest report and from what this router has sent it.

Reports lag, so the router's own bookings lie on top: at each report the part of the reported load that cannot be ours
is noted as foreign (other routers, direct clients), and the load at any moment is that plus our own bookings, which
change at once. Ours may be all that was booked at any moment since the report before: a request that has just ended may
still be in this one, and must not come back as a stranger.
"""

from __future__ import annotations

from typing import NamedTuple

from indexer.events import LoadReport
from indexer.types import WorkerRank

REPORT_LIFE = 10.0
"""Seconds after which a report says nothing any more: ten times the default interval."""


class Load(NamedTuple):
    """Requests and tokens that a rank has on its hands."""

    requests: int = 0
    prefill_tokens: int = 0
    """Prompt tokens still to compute of requests without a first token."""
    active_tokens: int = 0
    """Tokens (prompt and generated) of all requests in flight: what decoding reads at each step."""


class Metrics(NamedTuple):
    """What `get_metrics` tells of one rank; `age` in seconds, report and age None while there is no report."""

    load: Load
    report: LoadReport | None
    age: float | None


class _Ledger:
    """One rank's books."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests = 0
        self.prefill_tokens = 0
        self.active_tokens = 0
        self.most_requests = 0
        self.most_active_tokens = 0
        """The most that was booked at once since the last report."""
        self.foreign_requests = 0
        self.foreign_tokens = 0
        self.report: LoadReport | None = None
        self.reported_at = 0.0


class Reservation:
    """One request's booking on one rank. Owned by its response stream, which releases it however it ends."""

    def __init__(self, ledger: _Ledger, prefill_tokens: int, prompt_tokens: int) -> None:
        self._ledger = ledger
        self._prefill_tokens = prefill_tokens
        self._active_tokens = prompt_tokens
        self._released = False
        ledger.requests += 1
        ledger.prefill_tokens += prefill_tokens
        ledger.active_tokens += prompt_tokens
        ledger.most_requests = max(ledger.most_requests, ledger.requests)
        ledger.most_active_tokens = max(ledger.most_active_tokens, ledger.active_tokens)

    def first_token(self) -> None:
        """The prefill is done. Again, or after the release: nothing."""
        self._ledger.prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def generated(self, tokens: int) -> None:
        if not self._released:
            self._active_tokens += tokens
            self._ledger.active_tokens += tokens
            self._ledger.most_active_tokens = max(self._ledger.most_active_tokens, self._ledger.active_tokens)

    def release(self) -> None:
        """Give everything back; a second time does nothing."""
        if self._released:
            return
        self._released = True
        self.first_token()
        self._ledger.requests -= 1
        self._ledger.active_tokens -= self._active_tokens


class LoadBook:
    """All ranks' ledgers. A rank that is not known has no load."""

    def __init__(self) -> None:
        self._ledgers: dict[WorkerRank, _Ledger] = {}

    def watch(self, rank: WorkerRank, block_size: int) -> None:
        """Keep books for `rank`, whose reports count blocks of `block_size` tokens; bookings in flight stay."""
        self._ledgers.setdefault(rank, _Ledger(block_size)).block_size = block_size

    def forget(self, rank: WorkerRank) -> None:
        """Reservations in flight stay valid: they keep their ledger."""
        self._ledgers.pop(rank, None)

    def reserve(self, rank: WorkerRank, prefill_tokens: int, prompt_tokens: int) -> Reservation:
        return Reservation(self._ledgers[rank], prefill_tokens, prompt_tokens)

    def on_report(self, report: LoadReport, now: float) -> None:
        ledger = self._ledgers.get(report.rank)
        if ledger is None:
            return
        ledger.report = report
        ledger.reported_at = now
        reported = (report.request_active_slots or 0) + (report.num_requests_waiting or 0)
        ledger.foreign_requests = max(0, reported - ledger.most_requests)
        reported_tokens = (report.kv_active_blocks or 0) * ledger.block_size
        # Without foreign requests, blocks beyond our own are rounding and requests just ended, not load.
        foreign = max(0, reported_tokens - ledger.most_active_tokens)
        ledger.foreign_tokens = foreign if ledger.foreign_requests else 0
        ledger.most_requests, ledger.most_active_tokens = ledger.requests, ledger.active_tokens

    def load(self, rank: WorkerRank, now: float) -> Load:
        ledger = self._ledgers.get(rank)
        if ledger is None:
            return Load()
        if now - ledger.reported_at > REPORT_LIFE:
            return Load(ledger.requests, ledger.prefill_tokens, ledger.active_tokens)
        return Load(
            ledger.requests + ledger.foreign_requests,
            ledger.prefill_tokens,
            ledger.active_tokens + ledger.foreign_tokens,
        )

    def get_metrics(self, now: float) -> dict[WorkerRank, Metrics]:
        """Latest load of every rank; `now` on the same clock as the reports' times."""
        return {rank: self._metrics(rank, ledger, now) for rank, ledger in self._ledgers.items()}

    def _metrics(self, rank: WorkerRank, ledger: _Ledger, now: float) -> Metrics:
        age = now - ledger.reported_at if ledger.report else None
        return Metrics(self.load(rank, now), ledger.report, age)
