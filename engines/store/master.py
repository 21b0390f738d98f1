"""What a Mooncake master tells of itself: its state under /health, and what it counts under /metrics.

/health    {"role": "leader", "ha_state": "serving", "service_ready": true, "leader_address": null, …}
"""

from __future__ import annotations

import msgspec

from engines.answers import mapping, parse, text
from engines.prometheus import read_samples

HEALTH, METRICS = "/health", "/metrics"


class Health(msgspec.Struct, frozen=True):
    """None where the master does not tell, as older ones do not."""

    role: str | None = None
    """`leader` or `standby`."""
    ha_state: str | None = None
    ready: bool | None = None
    leader: str | None = None
    """Its address, where another leads."""


def read_health(body: bytes) -> Health:
    """What an answer of /health tells; nothing for any other answer."""
    found = mapping(parse(body))
    ready = found.get("service_ready")
    return Health(
        text(found.get("role")),
        text(found.get("ha_state")),
        ready if isinstance(ready, bool) else None,
        text(found.get("leader_address")),
    )


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What the master counts, events since its start; None: it does not count that."""

    keys: int | None = None
    pinned_keys: int | None = None
    """Keys that are evicted last (soft-pinned). Leases of single keys are not told anywhere."""
    clients: int | None = None
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    evictions: int | None = None
    """How often it evicted objects to make room."""
    evicted_keys: int | None = None
    evicted_bytes: int | None = None
    failed_puts: int | None = None
    """Objects that were not stored for want of room."""
    hits: int | None = None
    """Objects that were read from memory."""


_NAMES = {
    "master_key_count": "keys",
    "master_soft_pin_key_count": "pinned_keys",
    "master_active_clients": "clients",
    "master_total_capacity_bytes": "capacity_bytes",
    "master_allocated_bytes": "used_bytes",
    "master_successful_evictions_total": "evictions",
    "master_evicted_key_count": "evicted_keys",
    "master_evicted_size_bytes": "evicted_bytes",
    "master_put_start_alloc_failures_total": "failed_puts",
    "mem_cache_hit_nums_": "hits",
}


def read_counted(exposition: bytes) -> Counted:
    found = {_NAMES[sample.name]: int(sample.value) for sample in read_samples(exposition, _NAMES)}
    return Counted(**found)
