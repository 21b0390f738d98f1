"""What a failed request tells of the workers that it was sent to."""

from __future__ import annotations

from router.proxy.failures import Failure
from router.proxy.legs import Leg
from router.workers.fleet import Fleet
from router.workers.worker import Worker


def note_failure(fleet: Fleet, leg: Leg, failure: Failure, now: float) -> None:
    """The leg's worker has failed the request, or its part of it."""
    _count(fleet, leg.worker, failure, now)
    prefiller = fleet.workers.get(leg.decision.rank.worker_id)
    if leg.part == "whole" or failure.harmless or prefiller is None:
        return
    prefiller.coordinates = {}  # it may have restarted elsewhere; its next answers will tell
    if leg.part == "decode" and failure.kind == "error":
        # Perhaps the KV could not be fetched. It counts for both; their other requests will show whose fault it was.
        _count(fleet, prefiller, failure, now)


def _count(fleet: Fleet, worker: Worker, failure: Failure, now: float) -> None:
    if worker.pool.is_cut:  # it is being removed, which is no failure
        return
    if failure.kind == "unreachable":  # the next health check may take it back
        fleet.mark_down(worker, failure.reason)
    elif failure.kind not in {"busy", "unasked"}:
        fleet.failed(worker, now)
