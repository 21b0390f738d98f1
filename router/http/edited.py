"""How a worker's body is passed on when a word in it must be changed: event by event, or whole. Pure."""

from __future__ import annotations

from collections.abc import Callable

from router.http.chunked import decode_chunks, split_chunks
from router.http.relay import HELD, Events, chunk
from router.http.upstream import Head

Edit = Callable[[bytes], bytes]
_LINES_OF_ONE = 4
"""In a chunk that is one event: its size, two of the event, and its end."""


class EditedEvents(Events):
    """Chunked server-sent events; those that hold `word` are given to `edit`."""

    clean = False

    def __init__(self, word: bytes, edit: Edit, held_limit: int = HELD) -> None:
        super().__init__(held_limit)
        self._word = word
        self._edit = edit

    def body(self, data: bytes, boundary: int) -> bytes:
        whole = not self._in_pieces
        out = super().body(data, boundary)
        found = self._word in out or out.count(b"\n") > _LINES_OF_ONE  # between two chunks it may be cut
        return self._edited(out) if found and whole and not self._in_pieces else out

    def _edited(self, chunks: bytes) -> bytes:
        """Chunks as they came; joined to one where there is something to edit. What ends the body stays."""
        joined, last = split_chunks(chunks)
        return chunk(self._edit(joined)) + last if self._word in joined else chunks


class EditedBody:
    """A body that is no stream: sent when all of it is there."""

    until_close = False
    clean = False
    framing = b""

    def __init__(self, head: Head, edit: Edit) -> None:
        self._chunked = head.framing == "chunked"
        self._edit = edit
        self._pieces: list[bytes] = []

    def body(self, data: bytes, boundary: int) -> bytes:  # noqa: ARG002 -- a Relay
        self._pieces.append(data)
        return b""

    def end(self) -> bytes:
        body = b"".join(self._pieces)
        body = self._edit(decode_chunks(body) if self._chunked else body)
        self.framing = b"content-length: %d\r\n" % len(body)
        return body

    def broken(self, event: bytes) -> bytes | None:  # noqa: ARG002 -- a Relay
        return None
