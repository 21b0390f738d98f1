"""Patience with workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from router.settings.options import seconds


@dataclass(frozen=True, kw_only=True)
class Upstream:
    connect_timeout: Annotated[float, seconds("Upstream", "How long connecting to a worker may take.")] = 5.0
    pd_timeout: Annotated[
        float,
        seconds("Upstream", "How long the prefill or the decode part of a split request may take to begin answering."),
    ] = 300.0
    health_interval: Annotated[float, seconds("Upstream", "Time between two health checks of a worker.")] = 2.0
    load_interval: Annotated[float, seconds("Upstream", "Time between two readings of a worker's load.")] = 1.0
