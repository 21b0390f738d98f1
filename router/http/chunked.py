"""Chunked transfer coding, framed but not decoded: finds where chunks and server-sent events end.

So bytes can be relayed as they came, and a stream that breaks off can still be ended properly. Pure.
"""

from __future__ import annotations

_MAX_LINE = 4096
"""Longest chunk-size line (with extensions) or trailer line; a longer one is an attack."""
_HEXADECIMAL = b"0123456789abcdefABCDEF"
_DIGITS = 15
_PLAIN = 4
"""Least bytes of content with which the size line's end cannot be mistaken for part of an event's end."""
USUAL = 4096
"""Bytes below which pieces are looked up in SIZE_LINES."""
EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""A chunk's last bytes and its CRLF, when the chunk ends with a whole server-sent event."""


def _size_line(total: int) -> bytes:
    """The size line of a whole chunk of `total` bytes, framing included; a line longer than `total` if there is no such
    chunk."""
    for digits in range(1, 4):
        line = b"%x\r\n" % max(0, total - digits - 4)
        if len(line) == digits + 2 and total - digits - 4 >= _PLAIN:
            return line
    return b"-" * (total + 1)


SIZE_LINES = tuple(map(_size_line, range(USUAL)))
"""By length: how a piece begins that is exactly one chunk."""


class MalformedChunk(Exception):
    """Not chunked transfer coding."""


class ChunkedBody:
    """Feed it a body's bytes in any pieces; RFC 9112 section 7.1."""

    __slots__ = ("_ending", "_left", "_line", "_trailers", "at_start", "chunks", "done", "excess")

    def __init__(self) -> None:
        self.done = False
        self.excess = b""
        """Bytes after the end of the body."""
        self.chunks = 0
        """Chunks with content, so far."""
        self.at_start = True
        """Everything fed so far consists of whole chunks."""
        self._line = b""
        self._left = 0  # bytes of the current chunk's content and CRLF that are still to come
        self._ending = b""  # the last bytes of content, as many as an event's end has, and of the chunk's CRLF
        self._trailers = False

    def feed(self, data: bytes) -> int:
        """Returns the index in `data` behind the last chunk that ends a whole event (0: none), or behind the body's
        end. Raises MalformedChunk."""
        position, boundary, size = 0, 0, len(data)
        if self.at_start:
            while position < size:
                end = _end_of_chunk(data, position, size)
                if not end:
                    break
                self.chunks += 1
                if data.endswith(EVENT_ENDS, position, end):
                    boundary = end
                position = end
            if position:
                self._ending = data[position - 6 : position]  # all of one chunk, of at least `_PLAIN` bytes
        while position < size:
            if self._left:
                position = self._take_content(data, position)
                if not self._left and self._ending.endswith(EVENT_ENDS):
                    boundary = position
                continue
            position = self._take_line(data, position)
            if self.done:
                self.excess = data[position:]
                return position
        self.at_start = not (self._left or self._line or self._trailers)
        return boundary

    def _take_content(self, data: bytes, position: int) -> int:
        end = position + min(self._left, len(data) - position)
        self._left -= end - position
        self._ending = (self._ending + data[max(position, end - 6) : end])[-6:]
        return end

    def _take_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\n", position)
        line = self._line + (data[position:] if end < 0 else data[position:end])
        if len(line) > _MAX_LINE:
            raise MalformedChunk("a chunk's size line or trailer is too long")
        if end < 0:
            self._line = line
            return len(data)
        self._line = b""
        self._on_line(line.removesuffix(b"\r"))
        return end + 1

    def _on_line(self, line: bytes) -> None:
        if self._trailers:
            self.done = not line
            return
        digits = line.partition(b";")[0].rstrip(b" \t")
        # int() would also accept signs, blanks and underscores, which RFC 9112 forbids.
        if not digits or digits.strip(_HEXADECIMAL) or len(digits) > _DIGITS:
            raise MalformedChunk("a chunk's size is no hexadecimal number")
        length = int(digits, 16)
        if length:
            self.chunks += 1
            self._left = length + 2
            self._ending = self._ending[:-2]  # an event's last line may end with the chunk before
        else:
            self._trailers = True


def _end_of_chunk(data: bytes, start: int, size: int) -> int:
    """Where the chunk that begins at `start` ends; 0 if it is not whole, is not plain, or is the last."""
    line = data.find(b"\r\n", start, start + 2 + _DIGITS)
    digits = data[start:line]
    if line <= start or digits.strip(_HEXADECIMAL):
        return 0
    length = int(digits, 16)
    end = line + length + 4
    return end if length >= _PLAIN and end <= size else 0


def split_chunks(data: bytes) -> tuple[bytes, bytes]:
    """The content of whole chunks, and the last chunk with what follows it, if it is there."""
    content: list[bytes] = []
    position = 0
    while position < len(data):
        end = data.index(b"\n", position)
        length = int(data[position:end].partition(b";")[0], 16)
        if not length:
            break
        content.append(data[end + 1 : end + 1 + length])
        position = end + 1 + length + 2
    return b"".join(content), data[position:]


def decode_chunks(data: bytes) -> bytes:
    """The content of a whole chunked body, for receivers that do not know chunks (HTTP/1.0)."""
    return split_chunks(data)[0]
