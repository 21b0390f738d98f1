"""The beginning of a decode worker's stream, held back until it shows that the KV has come (pure).

Engines answer 200 before they know. Where it has not come an error event follows, in a chat behind the chunk with the
role; where the engine is told to stop meanwhile, the end of the answer.
"""

from __future__ import annotations

import re

from router.http.relay import HELD

_ERROR = re.compile(rb'(?:[0-9a-fA-F]+\r\n)?data: ?\{"(?:error": ?\{|object": ?"error")')
"""A chunk's first event, as vLLM and SGLang write it when the first token failed."""
_REQUESTS_OWN = re.compile(rb'"code": ?4(?!29)\d\d\b')
"""Of an error that another worker would answer too: SGLang tells of a grammar that is none so, once it streams."""
_ABORTED = re.compile(rb'"finish_reason": ?"abort"')
_ROLE = re.compile(rb'"delta": ?\{"role": ?"assistant"(?:, ?"content": ?(?:""|null))?(?:, ?"[a-z_]+": ?null)*\}')


class Opening:
    def __init__(self) -> None:
        self._held = b""
        self._boundary = 0

    def add(self, data: bytes, boundary: int) -> tuple[bytes, int]:
        """All that has come, and the boundary in it as in `Receiver.on_body`."""
        held, self._held = self._held, b""
        return held + data, len(held) + boundary if boundary else self._boundary

    def hold(self, data: bytes, boundary: int) -> bool:
        """Keep it, if it is no more than the role and a part of what follows."""
        if _first(data)[1] or len(data) > HELD:
            return False
        self._held, self._boundary = data, boundary
        return True

    def fails(self, data: bytes) -> bool:
        """Whether an error of the worker's, or the end, comes before anything that a client could use. `data`: all so
        far."""
        event, whole = _first(data)
        if _ERROR.match(event):
            return whole and not _REQUESTS_OWN.search(event)
        return is_aborted(event)


def is_aborted(answer: bytes) -> bool:
    """Whether its engine gave an answer up, or what came of it in an event."""
    return bool(_ABORTED.search(answer))


def _first(data: bytes) -> tuple[bytes, bool]:
    """The first event that says more than the role, as far as it is here, and whether that is all of it."""
    event, end, rest = data.partition(b"\n\n")
    if _ROLE.search(event):
        event, end, _ = rest.lstrip(b"\r\n").partition(b"\n\n")
    return event, bool(end)
