"""The few lines that are needed of a Prometheus text exposition (format 0.0.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?[ \t]*"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_ESCAPE = re.compile(r"\\.")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def read_samples(exposition: bytes, names: Collection[str]) -> list[Sample]:
    """The finite samples of the metrics in `names`, in order; lines that are not well-formed are left out.

    An engine's page has nearly a thousand lines, of which six or so are wanted, every second from each worker: only
    those become strings.
    """
    page = b"\n" + exposition
    lines = (_line(page, found.end()) for found in _beginnings(frozenset(names)).finditer(page))
    return [sample for line in lines if (sample := _read(line)) and sample.name in names]


@cache
def _beginnings(names: frozenset[str]) -> re.Pattern[bytes]:
    """Of lines that begin with one of the `names`."""
    return re.compile(b"\n(?=%s)" % b"|".join(re.escape(name.encode()) for name in names))


def _line(page: bytes, start: int) -> str:
    end = page.find(b"\n", start)
    return page[start : len(page) if end < 0 else end].decode("utf-8", "replace")


def _read(line: str) -> Sample | None:
    match = _LINE.fullmatch(line.rstrip("\r"))
    labels = None if match is None else _read_labels(match["labels"] or "")
    if match is None or labels is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    return Sample(match["name"], labels, value) if math.isfinite(value) else None


def _read_labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    place = 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            return None
        labels[match[1]] = _unescaped(match[2])
        place = match.end()
    return labels


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), value) if "\\" in value else value
