"""What an exchange asks of the router around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engines.disaggregation.answer import Prefilled
from router.http.messages import Response
from router.migration.migrating import Migration
from router.proxy.failures import Failure
from router.proxy.legs import Leg, Pair
from router.proxy.outcome import Outcome


class Routing(Protocol):
    """For one request."""

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Pair | Response], None]) -> None:
        """Choose and book one or two workers outside `exclude`, now or later; or answer why there is none."""

    def go_on(self, prefill: Leg, answer: Prefilled, exclude: frozenset[str]) -> Leg | Failure:
        """Choose and book the worker that decodes what `prefill` has computed, or say why there is none."""

    def prefilled(self, prefill: Leg, answer: Prefilled) -> None:
        """A prefill worker has answered."""

    def withdraw(self) -> None:
        """Cancel a pending `route`."""

    def can_retry(self, exclude: frozenset[str]) -> bool:
        """Whether `route` would find a worker, and the retry budget allows another try."""

    def waits_for(self, unreachable: frozenset[str]) -> bool:
        """Whether `route` would wait for a worker to be up, since none but the `unreachable` can serve the request."""

    def answered(self, leg: Leg) -> None:
        """A worker that has failed recently has begun to answer."""

    def resume(self, migration: Migration, exclude: frozenset[str]) -> frozenset[str] | None:
        """Prepare for another worker to continue the answer. Returns what to `route` with; None if there is no such
        worker."""

    def failed(self, leg: Leg, failure: Failure, retried: bool) -> None:
        """The leg's worker has failed this request."""

    def labelled(self, response: Response) -> Response:
        """`response`, which is not relayed from a worker, with the name of the request's arm."""

    def finished(self, outcome: Outcome) -> None: ...
