"""What routing logs: why a worker was chosen, and which one failed a request."""

from __future__ import annotations

import logging

from publishers.logs import log_event
from router.proxy.failures import Failure
from router.proxy.legs import Leg
from router.scheduling.decision import Decision, Prediction

logger = logging.getLogger(__name__)

_LONGEST_ID = 128
"""Characters of a request's id in a log line; a client may send thousands."""


def log_decision(decision: Decision, request_id: bytes) -> None:
    """Level debug."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    log_event(
        logger,
        logging.DEBUG,
        "Decided",
        request=_readable(request_id),
        worker=decision.rank,
        reason=decision.reason,
        prompt=decision.prompt_tokens,
        overlap=decision.overlap_tokens,
        stored=decision.stored_tokens,
        predicted=_in_words(decision.predicted),
        costs=", ".join(f"{rank} {cost:.4g}" for rank, cost in decision.costs.items()),
    )


def log_failure(leg: Leg, failure: Failure, retried: bool, request_id: bytes) -> None:
    log_event(
        logger,
        logging.WARNING,
        "No worker could be asked" if failure.kind == "unasked" else "Worker failed a request",
        request=_readable(request_id),
        worker=leg.worker.id,
        part=leg.part,
        reason=failure.reason,
        retried=retried,
    )


def _in_words(predicted: Prediction | None) -> str | None:
    return predicted and ", ".join(f"{name} {value:.3g}" for name, value in predicted._asdict().items())


def _readable(request_id: bytes) -> str:
    return request_id[:_LONGEST_ID].decode("latin-1")
