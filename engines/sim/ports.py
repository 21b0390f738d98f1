"""Checks before a simulated fleet is made that its ports are free, and says which is not and what it would be for."""

from __future__ import annotations

import errno
import socket

from engines.sim.settings import SimSettings


def check_ports(settings: SimSettings) -> None:
    """Raises OSError for the first that cannot be listened on."""
    for port, use in settings.ports():
        try:
            _bind(settings.host, port)
        except OSError as error:
            raise OSError(_sentence(settings.host, port, use, error)) from error


def _bind(host: str, port: int) -> None:
    """All addresses of `host`, as asyncio does, for a moment."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found:
        try:
            alone = socket.socket(family, kind, protocol)
        except OSError:  # IPv6, where there is none
            continue
        with alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                alone.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            alone.bind(address)


def _sentence(host: str, port: int, use: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"--host {host}: {error.strerror}"
    where = f"port {port} of {host}, for {use},"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken, perhaps by another kv-sim: give another --port, or 0 for free ones"
    return f"{where} cannot be listened on: {error.strerror or error}"
