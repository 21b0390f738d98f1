"""The settings of the plug-in inside vLLM, which it reads from environment variables.

Apart from `publishers.in_process`, since it is read in every process of vLLM, also in those that publish nothing: there
the index's compiled parts must not be loaded. (vLLM 0.32 on a CPU looks through all loaded modules for something called
`kernel` when a worker starts, and stumbles over llvmlite.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from publishers.connect import make_plane
from publishers.credentials import NatsFiles
from publishers.logs import log_event, show_fields
from publishers.plane import NAMESPACE_TAKES, WORKER_ID_TAKES, is_namespace, is_worker_id

logger = logging.getLogger(__name__)

_DIGITS = 10
"""More than any rank's number has."""


class Settings(msgspec.Struct, frozen=True):
    nats: str
    worker_id: str
    namespace: str = "default"
    files: NatsFiles = NatsFiles()
    first_rank: int = 0
    """What vLLM calls the rank that is this server's first: several servers of one data-parallel engine count theirs
    together, and the router counts each worker's from 0."""

    def rank(self, engine_rank: int) -> int:
        return max(0, engine_rank - self.first_rank)


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _DIGITS


_TAKES = (
    ("KV_ROUTER_WORKER_ID", WORKER_ID_TAKES, is_worker_id),
    ("KV_ROUTER_NAMESPACE", NAMESPACE_TAKES, is_namespace),
    ("KV_ROUTER_FIRST_RANK", "a number", _is_rank),
)
"""Variables, what each takes in words, and what tells whether a text is such."""


def settings_from(environ: Mapping[str, str]) -> Settings | None:
    """From KV_ROUTER_NATS, KV_ROUTER_WORKER_ID, KV_ROUTER_NAMESPACE, KV_ROUTER_FIRST_RANK, and KV_ROUTER_NATS_CREDS and
    the like; None, and said why, when they cannot be used.

    Silently None without KV_ROUTER_NATS. An engine must not fail because its router's settings are wrong.
    """
    nats = environ.get("KV_ROUTER_NATS")
    if not nats:
        return None
    show_fields()
    worker_id = environ.get("KV_ROUTER_WORKER_ID")
    if not worker_id:
        log_event(logger, logging.ERROR, "KV_ROUTER_NATS is set, but KV_ROUTER_WORKER_ID is not: nothing is published")
        return None
    for name, takes, is_right in _TAKES:
        given = environ.get(name)
        if given and not is_right(given):
            log_event(logger, logging.ERROR, f"{name} takes {takes}: nothing is published", given=given)
            return None
    files = NatsFiles(*(environ.get(f"KV_ROUTER_NATS_{name.upper()}") or None for name in NatsFiles._fields))
    try:
        _check_plane(nats, files)
    except ValueError as error:
        log_event(logger, logging.ERROR, "KV_ROUTER_NATS cannot be used: nothing is published", error=error)
        return None
    namespace, first_rank = environ.get("KV_ROUTER_NAMESPACE"), environ.get("KV_ROUTER_FIRST_RANK")
    return Settings(nats, worker_id, namespace or "default", files, int(first_rank or 0))


def _check_plane(nats: str, files: NatsFiles) -> None:
    """Raises ValueError."""
    if not nats.lower().startswith(("nats://", "tls://")):  # of the others, each process would have its own
        raise ValueError("it takes nats://[USER:PASSWORD@]HOST[:PORT] or tls://HOST[:PORT]")
    make_plane(nats, files)
