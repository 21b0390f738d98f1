"""How a worker's body is relayed: unchanged wherever the client can take it so. Pure: bytes in, bytes out.

Each relay can end a body that broke off. A stream of server-sent events ends with an error event. Any other body has no
honest end, so the client's connection must be broken too (`broken` returns None).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from router.http.chunked import decode_chunks
from router.http.upstream import Head

LAST_CHUNK = b"0\r\n\r\n"
_DONE = (b"data: [DONE]\n\n\r\n", b"data: [DONE]\r\n\r\n\r\n")
"""How the chunk with the last event ends."""

HELD = 64 * 1024
"""Most bytes of an event that are held back until it is whole; a longer event is relayed in pieces."""


class Relay(Protocol):
    framing: bytes
    """The header line that tells how the body ends; b"" if a relayed header or the connection's end tells it."""
    until_close: bool
    """Whether the body ends with the connection."""

    @property
    def clean(self) -> bool:
        """Whether pieces that end with a whole event would be relayed unchanged now."""

    def body(self, data: bytes, boundary: int) -> bytes:
        """What to send now. `boundary` as in `Receiver.on_body`."""

    def end(self) -> bytes: ...

    def broken(self, event: bytes) -> bytes | None:
        """What to send, including `event`, so that the client sees that the answer broke off; None if that cannot be
        shown."""


def relay_for(head: Head, http_1_0: bool) -> Relay:
    """The relay for an answer with this head. HTTP/1.0 clients do not know chunks."""
    if http_1_0:
        whole = Events(sys.maxsize) if head.events else None
        return Unchunked(whole) if head.framing == "chunked" else AsIs(until_close=head.framing == "close")
    if head.framing == "chunked":
        return Events() if head.events else AsIs(framing=b"transfer-encoding: chunked\r\n")
    return Rechunked(head.events) if head.framing == "close" else AS_IS


class AsIs:
    """Relays a body byte for byte."""

    clean = True

    def __init__(self, framing: bytes = b"", until_close: bool = False) -> None:
        self.framing = framing
        self.until_close = until_close

    def body(self, data: bytes, boundary: int) -> bytes:  # noqa: ARG002 -- a Relay
        return data

    def end(self) -> bytes:
        return b""

    def broken(self, event: bytes) -> bytes | None:  # noqa: ARG002 -- a Relay
        return None


AS_IS = AsIs()


class Events:
    """Chunked server-sent events: whole events are relayed byte for byte as they come, partial ones when they are
    whole."""

    framing = b"transfer-encoding: chunked\r\n"
    until_close = False

    def __init__(self, held_limit: int = HELD) -> None:
        """`held_limit` instead of `HELD`."""
        self._held_limit = held_limit
        self._held = b""
        self._in_pieces = False
        self._latest = b""
        """The latest bytes relayed here (not those that `pass_events` relays)."""

    @property
    def clean(self) -> bool:
        return not self._held and not self._in_pieces

    @property
    def between_events(self) -> bool:
        """Whether what was relayed ends with a whole event."""
        return not self._in_pieces

    def is_done(self, latest: bytes) -> bool:
        """Whether the stream is complete but for HTTP's last chunk. `latest`: the piece that came last, whichever way
        it was relayed."""
        told = latest.endswith(_DONE) or self._latest.endswith(_DONE)
        return told and not self._in_pieces and LAST_CHUNK.startswith(self._held)

    def body(self, data: bytes, boundary: int) -> bytes:
        data, boundary = self._held + data, boundary and boundary + len(self._held)
        if boundary:
            self._in_pieces = False
        elif len(data) > self._held_limit:
            self._in_pieces, boundary = True, len(data)
        self._held, passed = data[boundary:], data[:boundary]
        self._latest = passed or self._latest
        return passed

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def broken(self, event: bytes) -> bytes | None:
        if self._in_pieces:
            return None
        return chunk(event) + LAST_CHUNK


class Rechunked:
    """A body that ends with the worker's connection, or after a stated length, chunked for a client whose connection
    goes on."""

    framing = b"transfer-encoding: chunked\r\n"
    until_close = False
    clean = False

    def __init__(self, events: bool) -> None:
        self._events = events
        self._last = b""

    def body(self, data: bytes, boundary: int) -> bytes:  # noqa: ARG002 -- a Relay
        self._last = (self._last + data)[-4:]
        return chunk(data)

    def end(self) -> bytes:
        return LAST_CHUNK

    def broken(self, event: bytes) -> bytes | None:
        whole = self._events and self._last.endswith((b"\n\n", b"\r\n\r\n"))
        return chunk(event) + LAST_CHUNK if whole else None


class Whole:
    """A body that is not a stream, kept until it is complete; what is sent then is told by the classes derived."""

    framing = b""
    until_close = False
    clean = False

    def __init__(self, head: Head) -> None:
        self._chunked = head.framing == "chunked"
        self._pieces: list[bytes] = []

    def body(self, data: bytes, boundary: int) -> bytes:  # noqa: ARG002 -- a Relay
        self._pieces.append(data)
        return b""

    def _all(self) -> bytes:
        body = b"".join(self._pieces)
        return decode_chunks(body) if self._chunked else body


class AsEvent(Whole):
    """A body that is not a stream, as the last event of a stream that was begun before it came."""

    def __init__(self, head: Head, event_of: Callable[[bytes], bytes]) -> None:
        super().__init__(head)
        self._event_of = event_of

    def end(self) -> bytes:
        return chunk(self._event_of(self._all())) + LAST_CHUNK

    def broken(self, event: bytes) -> bytes | None:
        return chunk(event) + LAST_CHUNK


class Unchunked:
    """A chunked body for HTTP/1.0, ended by the connection: events as they come, anything else when it is complete."""

    framing = b""
    until_close = True
    clean = False

    def __init__(self, events: Events | None) -> None:
        """`events`: the relay of a stream of events, which holds each until it is whole; None for other bodies."""
        self._events = events
        self._pieces: list[bytes] = []

    def is_done(self, latest: bytes) -> bool:
        """As of `Events`."""
        return self._events is not None and self._events.is_done(latest)

    def body(self, data: bytes, boundary: int) -> bytes:
        if self._events:
            return decode_chunks(self._events.body(data, boundary))
        self._pieces.append(data)
        return b""

    def end(self) -> bytes:
        return decode_chunks(self._events.end() if self._events else b"".join(self._pieces))

    def broken(self, event: bytes) -> bytes | None:
        told = self._events.broken(event) if self._events else None
        return decode_chunks(told) if told else None


def chunk(data: bytes) -> bytes:
    """`data` as one chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


COMMENT = chunk(b": waiting\n\n")
"""What clients of server-sent events ignore."""
