"""Checks at the very start that the port is free: whoever starts a router should not learn last that it is taken."""

from __future__ import annotations

import socket
from typing import Any


def check_free(host: str, port: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """Returns the family, kind and protocol of a socket for the address, and the address itself with a free port in
    place of 0. Raises OSError if it cannot be listened on."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as alone:  # with SO_REUSEPORT, another router's port could be joined
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(address)
        return family, kind, protocol, alone.getsockname()
