"""What an engine's ZeroMQ socket says: read alike in one piece and cut anywhere, and kept within its limit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from publishers.zmtp import GREETING, Peer, Violation, message
from tests.fuzz.target import Target, pieces
from tests.publishers.test_zmtp import HELLO, command, ready

_LIMIT = 2048
_WORDS = (GREETING, HELLO, message([b"kv@w@m", bytes(8), b"payload"]), command(b"\x04PING\0\0x"), b"\x02" + bytes(8))


def _connection(data: bytes) -> Hashable:
    whole, cut = _read([data]), _read(pieces(data))
    assert whole == cut
    if isinstance(whole, str):
        return whole
    messages, answers = whole
    assert sum(len(frame) for frames in messages for frame in frames) <= len(data)
    assert all(sum(map(len, frames)) <= _LIMIT for frames in messages)
    return tuple(min(len(frames), 4) for frames in messages[:4]), answers


def _read(parts: Sequence[bytes]) -> tuple[list[list[bytes]], int] | str:
    """Messages, and how often it was answered; or what was wrong."""
    peer, messages = Peer("SUB", _LIMIT), list[list[bytes]]()
    try:
        for part in parts:
            messages += peer.feed(part)
    except Violation as violation:
        return str(violation)
    return messages, len(peer.answers)


def _seeds() -> Sequence[bytes]:
    talk = HELLO + message([b"kv@w@m", bytes(8), b"x" * 300]) + message([b"a"])
    return [
        b"",
        GREETING,
        HELLO,
        talk,
        GREETING + ready(b"XPUB") + command(b"\x04PING\0\x0acontext") + message([b"b", b""]),
    ]


TARGETS = [Target("zmtp", _connection, _seeds, _WORDS)]
