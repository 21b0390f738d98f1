"""How KV events come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from publishers.plane import NAMESPACE, NAMESPACE_TAKES
from router.settings.options import about


@dataclass(frozen=True, kw_only=True)
class Events:
    event_plane: Annotated[
        str,
        about(
            "Events",
            "How KV events reach the router: local reads the engines' ZMQ sockets itself; nats://HOST:PORT subscribes "
            "to what publishers send (tls://HOST:PORT with encryption); nats+embedded://HOST:PORT also starts that "
            "NATS server.",
            "PLANE",
            pattern=r"^(local|(nats|tls)://\S+|nats\+embedded://\S*)\Z",
            takes="local, nats://HOST:PORT, tls://HOST:PORT or nats+embedded://[HOST][:PORT]",
        ),
    ] = "local"
    event_namespace: Annotated[
        str,
        about(
            "Events",
            "Keeps fleets that share a NATS server apart; publishers must be given the same.",
            "NAME",
            pattern=rf"^{NAMESPACE}\Z",
            takes=NAMESPACE_TAKES,
        ),
    ] = "default"
