"""What routing tells of a request while it is traced. Without OpenTelemetry, so that the core needs none."""

from __future__ import annotations

from typing import Protocol

from indexer.types import WorkerRank
from router.http.messages import RequestHead
from router.proxy.legs import Part
from router.proxy.outcome import Outcome


class Spans(Protocol):
    """Of one request."""

    def begin_leg(self, part: Part, rank: WorkerRank, overlap_tokens: int | None) -> bytes:
        """A part is about to be sent to `rank`. Returns header lines for the worker, whose own spans go below."""

    def end_leg(self, part: Part, failure: str = "") -> None:
        """The part is done, or its worker has failed. `failure`: a predicate for the sentence "Worker X …"."""

    def end(self, outcome: Outcome) -> None:
        """The request is over, and with it all that has not ended yet."""


class Tracing(Protocol):
    def begin(self, head: RequestHead, model: str | None, request_id: bytes) -> Spans:
        """A request has been read."""
