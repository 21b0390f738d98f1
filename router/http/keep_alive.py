"""TCP's own probes of connections on which nothing is said for long: while a long prompt is computed, or an answer that
comes whole.

NAT and firewalls forget a connection after some minutes of silence, without a word to either side: the answer is then
lost, and everybody waits on. The probes keep it in their memory. They also tell of a client or worker whose host is
gone, which would otherwise never show while nothing is to be sent.
"""

from __future__ import annotations

import socket
from typing import Final

_PROBES: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Seconds of silence, seconds between probes, and how many go unanswered until the connection is over; where the system
has the option. Home routers may forget after a minute or two, cloud providers' NAT after four to six."""


def keep_alive(sock: socket.socket) -> None:
    """Connections that a listening socket accepts do as that one does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
