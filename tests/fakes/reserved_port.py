"""A port that stays ours while nothing listens there."""

from __future__ import annotations

import socket


class ReservedPort:
    """Of 127.0.0.1, until closed. A socket is bound to it that never listens: whoever takes any free port gets another,
    whoever connects is refused, and who asks for it by its number, as servers do with SO_REUSEADDR, may have it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
