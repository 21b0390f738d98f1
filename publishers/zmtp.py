"""ZMTP 3.0, what ZeroMQ's sockets say to each other over TCP: bytes in, messages out, without sockets.

As far as a subscriber or a dealer without encryption needs it (https://rfc.zeromq.org/spec/23/). We say that we speak
3.0, so that the other side, which may speak 3.1, takes subscriptions as messages, as it must.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

Kind = Literal["SUB", "DEALER"]
_PEERS: Final = {"SUB": (b"PUB", b"XPUB"), "DEALER": (b"ROUTER", b"DEALER", b"REP")}

_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _MECHANISM + b"\0" + bytes(31)
_MORE, _LONG, _COMMAND = 1, 2, 4
_MOST_FRAMES: Final = 64
"""Of a message; engines send three or four."""
_SHORTEST: Final = 2
_SIZED: Final = 9
"""Bytes before a frame of either length."""
_PING: Final = 7
"""Bytes of its name and its time; a context follows, which the answer repeats."""
_SOCKET_TYPE: Final = re.compile(rb"\x0bsocket-type\0\0\0(.)", re.IGNORECASE | re.DOTALL)


class Violation(Exception):
    """The other side does not speak as it should; nothing that it says means anything any more."""


class Peer:
    """The other side of one connection. What is to be sent to it is in `answers` after each `feed`."""

    def __init__(self, kind: Kind, most_bytes: int) -> None:
        """`most_bytes`: of a message."""
        self.ready = False
        """Messages may be sent."""
        self.answers: list[bytes] = [GREETING]
        self._kind = kind
        self._most_bytes = most_bytes
        self._greeted = False
        self._pieces: list[bytes] = []
        self._here = 0
        self._wanted = len(GREETING)
        """Bytes that must be here before anything can be read of them."""
        self._message: list[bytes] = []
        self._bytes = 0
        """Of `_message`."""

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are whole now. Raises Violation."""
        if self._pieces:
            self._pieces.append(data)
            self._here += len(data)
            if self._here < self._wanted:
                return []
            data = b"".join(self._pieces)
            self._pieces = []
        messages: list[list[bytes]] = []
        read = self._read(data, messages)
        if read < len(data):
            rest = data[read:] if read else data
            self._pieces, self._here = [rest], len(rest)
        return messages

    def _read(self, data: bytes, messages: list[list[bytes]]) -> int:
        """How many bytes of `data` are done with."""
        at, end = 0, len(data)
        if not self._greeted:
            if end < len(GREETING):
                return 0
            self._greet(data)
            at = len(GREETING)
        while end - at >= _SHORTEST:
            flags = data[at]
            if flags > _MORE | _LONG | _COMMAND:
                raise Violation("a frame of no known kind")
            begin, size = at + _SHORTEST, data[at + 1]
            if flags & _LONG:
                if end - at < _SIZED:
                    self._wanted = _SIZED
                    return at
                begin, size = at + _SIZED, int.from_bytes(data[at + 1 : at + _SIZED], "big")
            self._check(size)
            if end - begin < size:
                self._wanted = begin - at + size
                return at
            at = begin + size
            self._take(flags, data[begin:at], messages)
        self._wanted = _SHORTEST
        return at

    def _check(self, size: int) -> None:
        if self._bytes + size > self._most_bytes or len(self._message) == _MOST_FRAMES:
            raise Violation(f"a message of more than {self._most_bytes} bytes, or {_MOST_FRAMES} frames")

    def _greet(self, data: bytes) -> None:
        if data[0] != 0xFF or data[9] & 1 == 0 or data[10] < GREETING[10]:
            raise Violation("it does not speak ZMTP 3")
        if data[12:32] != _MECHANISM:
            raise Violation("it wants encryption or a password")
        self._greeted = True
        kind = self._kind.encode()
        self._command(b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)

    def _take(self, flags: int, frame: bytes, messages: list[list[bytes]]) -> None:
        if flags & _COMMAND:
            self._obey(frame)
        elif not self.ready:
            raise Violation("a message before it was ready")
        else:
            self._message.append(frame)
            self._bytes += len(frame)
            if not flags & _MORE:
                messages.append(self._message)
                self._message, self._bytes = [], 0

    def _obey(self, command: bytes) -> None:
        name = command[1 : 1 + command[0]] if command else b""
        if name == b"READY" and not self.ready:
            self._expect_type(command)
            self.ready = True
        elif name == b"ERROR":
            raise Violation("it refuses the connection")
        elif name == b"PING" and len(command) >= _PING:  # of 3.1, but sent to all where an application asks for it
            self._command(b"\x04PONG" + command[_PING:])

    def _expect_type(self, command: bytes) -> None:
        found = _SOCKET_TYPE.search(command)
        peer = command[found.end() : found.end() + found[1][0]] if found else b""
        if peer not in _PEERS[self._kind]:
            raise Violation(f"it is no {_PEERS[self._kind][0].decode()} socket")

    def _command(self, command: bytes) -> None:
        self.answers.append(_frame(_COMMAND, command))


def message(frames: Sequence[bytes]) -> bytes:
    """As it is sent, to who is ready."""
    last = len(frames) - 1
    return b"".join(_frame(_MORE if at < last else 0, frame) for at, frame in enumerate(frames))


def subscription(topic: bytes) -> bytes:
    """A SUB's message: everything that begins with `topic` is wanted."""
    return message([b"\x01" + topic])


def _frame(flags: int, content: bytes) -> bytes:
    if len(content) < 1 << 8:
        return bytes((flags, len(content))) + content
    return bytes((flags | _LONG,)) + len(content).to_bytes(8, "big") + content
