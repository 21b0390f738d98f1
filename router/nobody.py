"""What a request is told that no worker can serve."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet import Fleet, Worker
from router.http.messages import Response
from router.openai_errors import error_response
from router.pairing import loneliness

_NO_WORKER = (
    "The router knows no worker; add one with --worker http://HOST:PORT, or with POST /admin/workers on its admin "
    "surface (--admin-listen)."
)


def cannot(pinned: Worker, model: str | None) -> Response:
    """Of a request that names its worker."""
    draining = "it is draining" if pinned.draining else None
    why = pinned.trouble or draining or _not_alone(pinned) or f"it does not serve the model {model!r}"
    return error_response(503, f"Worker {pinned.id}, which alone may serve the request, cannot: {why}.")


def nobody(fleet: Fleet, model: str | None, refusal: str | None, *, retried: bool) -> Response:
    """`refusal`: why it cannot be served in two parts. `retried`: some workers have failed it."""
    if not fleet.workers:
        return error_response(503, _NO_WORKER)
    up = [worker for worker in fleet.up if worker.serves(model)]
    if up and refusal:
        message = f"The request cannot be served in two parts, because {refusal}; "
        return error_response(400, f"{message}and no worker that serves requests whole is up.")
    if up and not retried:
        return error_response(503, f"No worker can serve the request: {_lonely(up)}. See /ready.")
    what = "No worker is up" if model is None else f"No worker that serves {model!r} is up"
    return error_response(503, f"{what}; see /ready for what each worker lacks.")


def _not_alone(worker: Worker) -> str | None:
    return None if worker.role == "both" else f"it is a {worker.role} worker, which serves no request alone"


def _lonely(up: Sequence[Worker]) -> str:
    """What is wrong with a fleet in which somebody is up and nobody serves."""
    reasons = (f"{worker.id}: {why}" for worker in up if (why := loneliness(worker, up)))
    return next(reasons, "its workers serve /v1/completions and /v1/chat/completions only, in two parts")
