"""ZMQ endpoints as an engine states them, turned into what a client on another machine can connect to."""

from __future__ import annotations

import re

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^\[\]]+):(?P<port>[0-9]{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised, not bound
"""All interfaces: the engine listens there, and the worker URL's host is where to find it."""


def reachable(endpoint: str | None, worker_host: str, port_offset: int = 0) -> str | None:
    """The endpoint with the worker's host for a wildcard and its port moved by `port_offset`.

    A concrete host stays; `ipc://` and `inproc://` stay as they are. None for what is no endpoint.
    """
    if endpoint is None or endpoint.startswith(("ipc://", "inproc://")):
        return endpoint
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return None
    return tcp(match["host"], int(match["port"]) + port_offset, worker_host)


def tcp(host: str, port: int, worker_host: str) -> str | None:
    """`tcp://host:port`, with the worker's host for a wildcard; None when there can be no such port."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare in _WILDCARDS:
        bare = worker_host.removeprefix("[").removesuffix("]")
    if not bare or not 0 < port < 65536:
        return None
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"
