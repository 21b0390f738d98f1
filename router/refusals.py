"""The answers to requests that are not served: too much is going on, or no worker can take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from router.http.messages import Response
from router.openai.errors import error_response
from router.scheduling.admission import QueueFull, QueueTimeout, Refusal
from router.scheduling.waiting import AnyRefusal
from router.split.pairing import counterparts, why_unpaired
from router.workers.fleet import Fleet
from router.workers.worker import Worker

_NO_WORKER = (
    "The router knows no worker; add one with --worker http://HOST:PORT, or with POST /admin/workers on its admin "
    "surface (--admin-listen)."
)


def too_busy(refusal: AnyRefusal) -> Response:
    """Says why the request was refused, or was held for too long; that nothing was done; and when to try again."""
    status, message, details = _in_words(refusal)
    again = f"nothing was done for this request. Try again in {refusal.retry_after} s."
    later = (b"retry-after", b"%d" % refusal.retry_after)
    return error_response(status, f"{message}; {again}", code=refusal.code, details=details, header=later)


def _in_words(refusal: AnyRefusal) -> tuple[int, str, Mapping[str, float]]:
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


def pinned_worker_cannot(worker: Worker, model: str | None) -> Response:
    """The request names this worker, which does not take it."""
    draining = "it is draining" if worker.draining else None
    role = None if worker.role == "both" else f"it is a {worker.role} worker, which serves no request alone"
    why = worker.trouble or draining or role or f"it does not serve the model {model!r}"
    return error_response(503, f"Worker {worker.id}, which alone may serve the request, cannot: {why}.")


def over_length(most: int, prompt: int, answer: int) -> Response:
    """In words that clients look for which shorten their prompt and try again: OpenAI and vLLM use them."""
    length = f"This model's maximum context length is {most} tokens"
    asked = f"you requested {answer} output tokens, and your prompt has {prompt} tokens"
    return error_response(400, f"{length}. However, {asked}.", code="context_length_exceeded")


def no_worker(
    fleet: Fleet,
    model: str | None,
    refusal: str | None,
    *,
    retried: bool,
    unfit: Collection[str] = (),
    too_long: Response | None = None,
) -> Response:
    """`refusal`: why the request cannot be served in two parts. `retried`: some workers have failed it already.
    `unfit`: workers that no request of its form, or of its length, may go to. `too_long`: the answer to a request that
    is too long for those that are up."""
    if not fleet.workers:
        return error_response(503, _NO_WORKER)
    up = [worker for worker in fleet.up if worker.serves(model) and worker.id not in unfit]
    if up and refusal:
        message = f"The request cannot be served in two parts, because {refusal}; "
        known = [worker for worker in fleet.workers.values() if worker.serves(model) and worker.id not in unfit]
        status = 503 if any(worker.role == "both" for worker in known) else 400  # that one may come back
        if too_long and status == 400:
            return too_long
        return error_response(status, f"{message}and no worker that serves requests whole is up.")
    if up and not retried:
        return error_response(503, f"No worker can serve the request: {_why_none(up)}. See /ready.")
    if up:
        return error_response(503, "Workers have failed the request, and there is no other to try it at; see /ready.")
    kind = "No worker that can take the request" if unfit else "No worker"
    what = f"{kind} is up" if model is None else f"{kind} that serves {model!r} is up"
    return error_response(503, f"{what}; see /ready for what each worker lacks.")


def _why_none(up: Sequence[Worker]) -> str:
    """Why no request can be served although workers are up."""
    others = counterparts(up)
    reasons = (f"{worker.id}: {why}" for worker in up if (why := why_unpaired(worker, others)))
    return next(reasons, "its workers serve only what can be served in two parts")
