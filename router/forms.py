"""Forms with files, as recordings are sent to be transcribed: which model they name. Pure."""

from __future__ import annotations

import re

from router.http.messages import Headers, first

_BOUNDARY = re.compile(rb'multipart/form-data[ \t]*;.*\bboundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_LINES = rb"(?:[^\r\n]+\r\n)*"
_MODEL = re.compile(
    rb'\r\n%s?content-disposition:[^\r\n]*;[ \t]*name=(?:model|"model")[ \t]*(?:;[^\r\n]*)?\r\n%s\r\n'
    % (_LINES, _LINES),
    re.IGNORECASE,
)
_MOST_FIELDS = 64
_LONGEST_HEAD = 1024
_LONGEST_NAME = 1024
"""Bounds on what is looked through of a body that a client may write to be slow to read."""


def form_model(headers: Headers, body: bytes) -> str | None:
    """The model that a form names; None if it names none, and for any other body."""
    found = _BOUNDARY.match(first(headers, b"content-type") or b"")
    if not found:
        return None
    delimiter = b"--" + (found[1] or found[2])
    start = body.find(delimiter)
    for _ in range(_MOST_FIELDS):
        end = body.find(b"\r\n" + delimiter, start)
        if start < 0 or end < 0:
            return None
        part = _MODEL.match(body, start + len(delimiter), min(end, start + _LONGEST_HEAD))
        if part:
            return body[part.end() : end].decode(errors="replace") if end - part.end() <= _LONGEST_NAME else None
        start = end + 2
    return None
