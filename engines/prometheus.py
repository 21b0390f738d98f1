"""The few lines that are needed of a Prometheus text exposition (format 0.0.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from typing import NamedTuple

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?[ \t]*"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def read_samples(exposition: bytes, names: Container[str]) -> list[Sample]:
    """The finite samples of the metrics in `names`, in order; lines that are not well-formed are left out."""
    lines = exposition.decode("utf-8", "replace").split("\n")
    wanted = (line for line in lines if line[: _name_length(line)] in names)
    return [sample for line in wanted if (sample := _read(line)) is not None]


def _name_length(line: str) -> int:
    return len(line.partition("{")[0].partition(" ")[0])


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
        labels[match[1]] = re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), match[2])
        place = match.end()
    return labels
