"""Recognises heads that a peer repeats: most are the same but for the number in Content-Length.

The parsed head is used again for the next one if both are equal byte for byte outside of that number. Any other head
goes to the parser, so nothing is accepted here that the parser did not accept before. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from router.http.messages import RequestHead

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})\r\n", re.IGNORECASE)
_LONGEST = 15
"""Most digits of a Content-Length that are read without the parser (a petabyte)."""


class RepeatedRequest(NamedTuple):
    """The last request's head on a connection, in two parts around its Content-Length."""

    before: bytes
    after: bytes
    head: RequestHead

    def find(self, data: bytes) -> tuple[int, int] | None:
        """(where the body begins, its length) if `data` begins with this head."""
        start = len(self.before)
        end = data.find(b"\r", start, start + _LONGEST + 1)
        if end < 0:
            return None
        digits = data[start:end]
        if not digits.isdigit() or not data.startswith(self.before) or not data.startswith(self.after, end):
            return None
        return end + len(self.after), int(digits)


def repeated_request(raw: bytes, head: RequestHead) -> RepeatedRequest | None:
    """For recognising the head of `raw` (the bytes of a message from its first) when it comes again. None if more than
    the head decides how the message is read."""
    end = raw.find(b"\r\n\r\n") + 4
    found = _LENGTH.search(raw, 0, end)
    if (
        not found
        or head.method != b"POST"
        or not head.keep_alive
        or head.http_1_0
        or any(name in _SPECIAL for name, _ in head.headers)
    ):
        return None
    return RepeatedRequest(raw[: found.start(1)], raw[found.end(1) : end], head)


_SPECIAL = frozenset((b"expect", b"transfer-encoding", b"upgrade"))


def without_length(raw: bytes) -> tuple[bytes, int | None]:
    """The head with `#` for the digits of its Content-Length, and that number (None: there is none)."""
    found = _LENGTH.search(raw)
    return (raw[: found.start(1)] + b"#" + raw[found.end(1) :], int(found[1])) if found else (raw, None)
