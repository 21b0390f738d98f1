"""The workers, and the store that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from router.settings.options import about
from router.store.spec import StoreSpec, read_store
from router.workers.spec import WorkerSpec, read_workers


@dataclass(frozen=True, kw_only=True)
class Workers:
    workers: Annotated[
        tuple[WorkerSpec, ...],
        about(
            "Workers",
            "An engine to route to; repeat the flag for each (ROUTER_WORKER separates them by white space, YAML takes "
            "a list). Keys: events and replay (ZMQ endpoints), block_size (tokens), role (auto, prefill, decode or "
            "both), connector (how its KV is transferred), bootstrap_port, store (true or false), host and name.",
            "URL[,KEY=VALUE...]",
            key="worker",
            takes="an engine's address such as http://127.0.0.1:8000",
            read=read_workers,
        ),
    ] = ()
    store: Annotated[
        StoreSpec | None,
        about(
            "Workers",
            "The master of a Mooncake Store that the workers share, at its metrics port. Keys: model, hash, hash_seed, "
            "tp, pp, block_size, budget_ms, keep, warm, copy, rpc.",
            "URL[,KEY=VALUE...]",
            takes="the master's address such as http://10.0.0.5:9003, or none",
            read=read_store,
        ),
    ] = None
