"""The operator's limits on held and running requests; they may change while the router runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Limits:
    """None: no limit. After a change, wake the queue: held requests may have room now."""

    max_queue: int | None = None
    """Requests held in the router."""
    queue_timeout: float | None = None
    """Seconds that a request is held."""
    max_concurrency: int | None = None
    """Requests at all workers together; a request in two parts counts at each of its workers."""
    max_worker_concurrency: int | None = None
    """Requests at each worker, over all its ranks."""

    @property
    def concurrency(self) -> bool:
        """Whether there is a limit on running requests."""
        return self.max_concurrency is not None or self.max_worker_concurrency is not None
