"""Relays a worker's body in which a word must be replaced: event by event, or as a whole. Pure."""

from __future__ import annotations

from collections.abc import Callable

from router.http.chunked import decode_chunks, split_chunks
from router.http.relay import HELD, Events, chunk
from router.http.upstream import Head

Edit = Callable[[bytes], bytes]
_LINES_OF_ONE = 4
"""Lines of a chunk that is one event: the size, two of the event, and the end."""


class EditedEvents(Events):
    """Chunked server-sent events; those that contain `word` are passed through `edit`."""

    clean = False

    def __init__(self, word: bytes, edit: Edit, held_limit: int = HELD) -> None:
        super().__init__(held_limit)
        self._word = word
        self._edit = edit

    def body(self, data: bytes, boundary: int) -> bytes:
        whole = not self._in_pieces
        out = super().body(data, boundary)
        found = self._word in out or out.count(b"\n") > _LINES_OF_ONE  # the word may be cut in two by a chunk's end
        return self._edited(out) if found and whole and not self._in_pieces else out

    def _edited(self, chunks: bytes) -> bytes:
        """Chunks as they came, or joined to one chunk if there is something to edit. The body's end stays."""
        joined, last = split_chunks(chunks)
        return chunk(self._edit(joined)) + last if self._word in joined else chunks


class EditedBody:
    """A body that is not a stream: sent when it is complete."""

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
