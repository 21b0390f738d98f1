"""Dealing with workers: time limits, retries, breakers, migration, checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from router.settings.options import Above0, about, seconds, seconds_or_none


@dataclass(frozen=True, kw_only=True)
class Upstream:
    connect_timeout: Annotated[float, seconds("Upstream", "How long connecting to a worker may take.")] = 5.0
    pd_timeout: Annotated[
        float,
        seconds("Upstream", "How long the prefill or the decode part of a split request may take to begin answering."),
    ] = 300.0
    first_byte_timeout: Annotated[
        Above0 | None,
        seconds_or_none("Upstream", "How long a streamed answer may take to begin; then another worker is tried."),
    ] = 600.0
    idle_timeout: Annotated[
        Above0 | None,
        seconds_or_none("Upstream", "How long an answer that has begun may pause before it counts as broken off."),
    ] = 300.0
    request_timeout: Annotated[
        Above0 | None,
        seconds_or_none(
            "Upstream", "How long a request may take in all, including the time that it is held in the router."
        ),
    ] = 3600.0
    stall_timeout: Annotated[
        Above0 | None,
        seconds_or_none(
            "Upstream",
            "How long all of a worker's streams, and its prefills for decode workers, may go without progress before "
            "its breaker opens, whatever its health check says. Once a worker is down, this applies to its "
            "answers that are not streamed, too.",
        ),
    ] = 60.0
    retry_budget: Annotated[
        float,
        about(
            "Upstream",
            "Most retries on other workers, as a share of requests; ten a second are always allowed.",
            "SHARE",
            ge=0,
            le=1,
        ),
    ] = 0.2
    breaker_failures: Annotated[
        int,
        about(
            "Upstream",
            "Failures within ten seconds after which a worker gets no requests for a while, if at least half of the "
            "requests that ended there failed.",
            "NUMBER",
            ge=1,
        ),
    ] = 5
    migration_limit: Annotated[
        int,
        about(
            "Upstream",
            "How many times a stream that breaks off may continue on another worker (docs/migration.md); with 0, it "
            "ends in an error.",
            "NUMBER",
            ge=0,
        ),
    ] = 0
    health_interval: Annotated[float, seconds("Upstream", "Time between two health checks of a worker.")] = 2.0
    load_interval: Annotated[float, seconds("Upstream", "Time between two readings of a worker's load.")] = 1.0
