"""The beginning of a stream, which may be an error: engines answer 200 before they know (pure).

A decode worker's is held back until it shows that the KV has arrived. If it does not arrive, an error event follows, in
a chat after the chunk with the role; if the engine is shut down meanwhile, the end of the answer does.
"""

from __future__ import annotations

import re

from engines.answers import ENGINE_DIED
from router.http.relay import HELD

_ERROR = re.compile(rb'(?:[0-9a-fA-F]+\r\n)?data: ?\{"(?:error": ?\{|object": ?"error")')
"""The first event of a chunk, as vLLM and SGLang write it when the first token could not be computed."""
_REQUESTS_OWN = re.compile(rb'"(?:status_)?code": ?4(?!29)\d\d\b')
"""An error that any other worker would answer too: so SGLang reports an invalid grammar once it streams."""
_NAMED_ERROR = re.compile(
    rb'(?:[0-9a-fA-F]+\r\n)?event: ?error\r?\ndata: ?\{"type": ?"error", ?"error": ?\{"type": ?'
    rb'"(internal_error|api_error|overloaded_error)"'
)
"""The same on /v1/messages, whose errors have no code; other types are the request's own."""
_CODE = re.compile(rb'"(?:status_)?code": ?([45]\d\d)\b')
_DIED = ENGINE_DIED.encode()
_ABORTED = re.compile(rb'"finish_reason": ?(?:"abort"|\{"type": ?"abort")')
"""The second form is that of SGLang's /generate, which has no error events for what the scheduler gives up."""
_ROLE = re.compile(rb'"delta": ?\{"role": ?"assistant"(?:, ?"content": ?(?:""|null))?(?:, ?"[a-z_]+": ?null)*\}')


class Opening:
    def __init__(self) -> None:
        self._held = b""
        self._boundary = 0

    def add(self, data: bytes, boundary: int) -> tuple[bytes, int]:
        """Everything that has come so far, and the boundary in it as in `Receiver.on_body`."""
        held, self._held = self._held, b""
        return held + data, len(held) + boundary if boundary else self._boundary

    def hold(self, data: bytes, boundary: int) -> bool:
        """Hold the data back, unless it has a whole event besides the role; returns whether it is held."""
        if _first(data)[1] or len(data) > HELD:
            return False
        self._held, self._boundary = data, boundary
        return True

    def fails(self, data: bytes) -> bool:
        """Whether the worker failed, or the stream ended, before anything that a client could use. `data`: everything
        so far."""
        event, whole = _first(data)
        if _ERROR.match(event):
            return whole and (_DIED in event or not _REQUESTS_OWN.search(event))
        return whole and is_aborted(event)


def error_status(data: bytes) -> int | None:
    """The status that a stream of 200 amounts to, by its first event: so SGLang answers while its queue is full, and
    vLLM once its engine has died. None if that event, with which `data` begins, is no error."""
    if b'"error"' not in data and b'"abort"' not in data:  # nearly always
        return None
    event, whole = _first(data)
    if whole and (named := _NAMED_ERROR.match(event)):
        return 503 if named[1] == b"overloaded_error" else 500
    if not whole or not (_ERROR.match(event) or _ABORTED.search(event)):
        return None
    code = None if _DIED in event else _CODE.search(event)
    return int(code[1]) if code else 500


def is_aborted(answer: bytes) -> bool:
    """Whether the engine aborted the request, by its whole answer or one event of it, and another one might not."""
    found = _ABORTED.search(answer)
    return found is not None and not _REQUESTS_OWN.search(answer, found.end())


def _first(data: bytes) -> tuple[bytes, bool]:
    """The first event that says more than the role, as far as it has come, and whether it is complete."""
    event, end, rest = data.partition(b"\n\n")
    if _ROLE.search(event):
        event, end, _ = rest.lstrip(b"\r\n").partition(b"\n\n")
    return event, bool(end)
