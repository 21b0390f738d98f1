"""Relays a worker's body in which a word must be replaced: event by event, or as a whole. Pure."""

from __future__ import annotations

from collections.abc import Callable

from router.http.chunked import split_chunks
from router.http.relay import HELD, Events, Whole, chunk
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


class EditedBody(Whole):
    """A body that is not a stream: sent when it is complete."""

    def __init__(self, head: Head, edit: Edit) -> None:
        super().__init__(head)
        self._edit = edit

    def end(self) -> bytes:
        body = self._edit(self._all())
        self.framing = b"content-length: %d\r\n" % len(body)
        return body

    def broken(self, event: bytes) -> bytes | None:  # noqa: ARG002 -- a Relay
        return None
