"""ZMQ endpoints as an engine states them, turned into what a client on another machine can connect to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

import msgspec

from engines import problems
from engines.description import EngineDescription

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^\[\]]+):(?P<port>[0-9]{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - recognised, not bound
"""All interfaces: the engine listens there, and the worker URL's host is where to find it."""


def is_endpoint(text: str) -> bool:
    """Whether it can be connected to, or listened on where its host is `*`."""
    tcp = re.fullmatch(r"tcp://(?:\*|\[[\w:.%]+\]|[^\s:*\[\]/]+):([0-9]{1,5})", text)
    return 0 < int(tcp[1]) < 65536 if tcp else bool(re.fullmatch(r"ipc://\S+", text))


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
    return f"tcp://{url_host(bare)}:{port}"


def url_host(host: str) -> str:
    """As URLs and endpoints have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def confined(
    description: EngineDescription, host: str, others: Collection[str], *, stated: bool = False
) -> EngineDescription:
    """`description` without events, and saying why, where it names an endpoint that is on neither `host`, the worker
    URL's, nor one of `others`: whoever follows it would connect wherever a worker says. `stated`: where its events come
    from, an operator has said, so that only where it replays them counts."""
    allowed = {_bare(name) for name in (host, *others)}
    endpoints = [each.replay for each in description.event_sources]
    endpoints += [] if stated else [each.endpoint for each in description.event_sources]
    if all(endpoint is None or _host_of(endpoint) in allowed for endpoint in endpoints):
        return description
    said = (*description.problems, problems.FOREIGN_ENDPOINT)
    return msgspec.structs.replace(description, event_sources=(), problems=said)


def _host_of(endpoint: str) -> str | None:
    """A socket in the file system is on this machine, like what it is for."""
    if endpoint.startswith("ipc://"):
        return _HERE
    match = _TCP.fullmatch(endpoint)
    return _bare(match["host"]) if match else None


_HERE = "localhost"


def _bare(host: str) -> str:
    """One spelling for each; all that is this machine is one."""
    bare = host.removeprefix("[").removesuffix("]").lower()
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    return _HERE if address.is_loopback else str(address)
