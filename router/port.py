"""The port to listen on, before anything is ready to: that it is taken should not be told last."""

from __future__ import annotations

import socket
from typing import Any


def check_free(host: str, port: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """Family, kind and protocol of a socket for it, and the address, with a free port in place of 0. Raises OSError for
    what cannot be listened on."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as alone:  # with SO_REUSEPORT, another router's port could be joined
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(address)
        return family, kind, protocol, alone.getsockname()
