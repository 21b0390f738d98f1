"""What a client is told whose request was refused, or held for too long."""

from __future__ import annotations

from collections.abc import Mapping

from router.http.messages import Response
from router.openai_errors import error_response
from router.scheduling.admission import QueueFull, QueueTimeout, Refusal
from router.scheduling.waiting import AnyRefusal


def refused(refusal: AnyRefusal) -> Response:
    """Says what was wrong, that nothing was done, and when to try again."""
    status, message, details = _told(refusal)
    again = f"nothing was done for this request. Try again in {refusal.retry_after} s."
    response = error_response(status, f"{message}; {again}", code=refusal.code, details=details)
    return response._replace(headers=((b"retry-after", b"%d" % refusal.retry_after),))


def _told(refusal: AnyRefusal) -> tuple[int, str, Mapping[str, float]]:
    match refusal:
        case Refusal(objective, predicted, limit):
            what = "time to first token" if objective == "ttft" else "time between tokens"
            message = f"Too busy: the predicted {what} is {predicted:.3g} s, and the objective {limit:.3g} s"
            return 429, message, {"predicted_seconds": round(predicted, 4), "limit_seconds": limit}
        case QueueFull(held):
            return 429, "Too busy: the queue is full", {"held": held}
        case QueueTimeout(waited, limit):
            message = f"Too busy: no worker was ready after {waited:.3g} s in the queue, where {limit:g} s are allowed"
            return 408, message, {"limit_seconds": limit}
