"""The few lines that are needed of a Prometheus text exposition (format 0.0.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?[ \t]*"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_ESCAPE = re.compile(r"\\.")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

_MOST_KNOWN, _LONGEST_KNOWN = 2048, 4096
"""How many samples' labels are remembered, and how many characters those of one have at most. vLLM's have about a
thousand where it tells its configuration, every second the same."""


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(exposition: bytes, names: Collection[str]) -> list[Sample]:
    """The finite samples of the metrics in `names`, in order; lines that are not well-formed are left out.

    An engine's page has nearly a thousand lines, of which six or so are wanted, every second from each worker: only
    those become strings.
    """
    page = b"\n" + exposition
    lines = (_line(page, found.start() + 1) for found in _beginnings(frozenset(names)).finditer(page))
    return [sample for line in lines if (sample := _read(line)) and sample.name in names]


@cache
def _beginnings(names: frozenset[str]) -> re.Pattern[bytes]:
    """Of lines that begin with one of the `names`."""
    return re.compile(b"\n(?:%s)" % b"|".join(re.escape(name.encode()) for name in names))


def _line(page: bytes, start: int) -> str:
    end = page.find(b"\n", start)
    return page[start : len(page) if end < 0 else end].decode("utf-8", "replace")


def _read(line: str) -> Sample | None:
    match = _LINE.fullmatch(line.rstrip("\r"))
    labels = None if match is None else _labels(match["labels"] or "")
    if match is None or labels is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    return Sample(match["name"], labels, value) if math.isfinite(value) else None


def _labels(text: str) -> Mapping[str, str] | None:
    return _known_labels(text) if len(text) <= _LONGEST_KNOWN else _read_labels(text)


def _read_labels(text: str) -> Mapping[str, str] | None:
    labels: dict[str, str] = {}
    place = 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            return None
        labels[match[1]] = _unescaped(match[2])
        place = match.end()
    return labels


_known_labels = lru_cache(_MOST_KNOWN)(_read_labels)


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), value) if "\\" in value else value
