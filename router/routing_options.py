"""What a request asks for about its routing."""

from __future__ import annotations

from collections.abc import Callable

from engines.description import EngineKind
from router.arms import Arm
from router.migration.migrating import Migration
from router.workers.worker import Worker


class RoutingOptions:
    pinned: Worker | None = None
    """The worker that it names; no other may serve it."""
    ttft_slo: float | None = None
    """Seconds."""
    priority: int = 0
    streamed: bool = False
    arm: Arm | None = None
    """Its arm of a live A/B test."""
    body: bytes | None = None
    """The body of a request that may be served in two parts."""
    name_rank: Callable[[bytes, int], bytes] | None = None
    """Puts a data-parallel rank into `body`, where no header picks one."""
    tenant: str = ""
    """By its API key, or by its tenant header; "" for all other requests together."""
    ended: Callable[[], None] | None = None
    """Called once when it is over."""
    migration: Migration | None = None
    """Set if another worker may continue its answer."""
    request_id: bytes = b""
    engine: EngineKind | None = None
    """The only kind that takes it; None: all do."""
    recomputed: bool = False
    """Its engine may compute all of the prompt, whatever it holds, so that what it reports as cached cannot be compared
    with the index."""
    uncached: bool = False
    """Its engine surely does."""
