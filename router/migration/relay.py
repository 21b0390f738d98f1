"""A stream on its way to the client through its record: from chunks to events and back."""

from __future__ import annotations

from collections.abc import Iterator

from router.http.chunked import split_chunks
from router.http.relay import Events, chunk
from router.migration.record import Record

FIRST_HELD = 64 * 1024**2
"""The limit in place of `HELD`: the first event of such a stream holds the prompt's tokens."""


class RecordedEvents(Events):
    """Relays one worker's part of a stream through the stream's record."""

    clean = False

    def __init__(self, record: Record, held_limit: int = FIRST_HELD) -> None:
        """`held_limit` as of `Events`."""
        super().__init__(held_limit)
        self._record = record

    def body(self, data: bytes, boundary: int) -> bytes:
        whole = not self._in_pieces
        out = super().body(data, boundary)
        if not whole or self._in_pieces:
            self._record.lose()
            return out
        return self._recorded(out) if out else b""

    def _recorded(self, chunks: bytes) -> bytes:
        content, last = split_chunks(chunks)
        alone = content.find(b"\n\n") == len(content) - 2
        out = self._record.feed(content) if alone else b"".join(map(self._record.feed, _events(content)))
        if not self._record.done:
            last = b""  # another will end it
        return chunk(out) + last if out else last


def _events(content: bytes) -> Iterator[bytes]:
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n")  # no other may end a line in what engines send
    *events, rest = content.split(b"\n\n")
    for event in events:
        yield event + b"\n\n"
    if rest:
        yield rest
