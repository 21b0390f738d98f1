"""How much is taken on at a time: what an operator allows, and may change while the router runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Limits:
    """None: no limit. Whoever changes one wakes the queue, as others may go now."""

    max_queue: int | None = None
    """Requests held in the router."""
    queue_timeout: float | None = None
    """Seconds that a request is held."""
    max_concurrency: int | None = None
    """Requests at workers, in all; a request in two parts counts at each worker that it is at."""
    max_worker_concurrency: int | None = None
    """The same for each worker, all its ranks together."""

    @property
    def concurrency(self) -> bool:
        """Whether workers may be full."""
        return self.max_concurrency is not None or self.max_worker_concurrency is not None
