"""Recorded traces that tell only when requests came and how long they were (pure): CSV, as Azure publishes them
(https://github.com/Azure/AzurePublicDataset) and as BurstGPT does (https://github.com/HPMLL/BurstGPT).

They do not tell what prompts share, so each prompt is unlike all others.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count, islice
from typing import NamedTuple

from router.ab.errors import RunError
from router.ab.trace import BLOCK_TOKENS, Row


class Columns(NamedTuple):
    """The names of those that are read, and what turns a time into seconds."""

    time: str
    prompt: str
    answer: str
    seconds: Callable[[str], float]


def _since_1970(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


_KNOWN = (
    Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _since_1970),
    Columns("Timestamp", "Request tokens", "Response tokens", float),
)


def find_columns(header: str) -> Columns | None:
    """Those of a file with this first line; None if it is no trace of lengths."""
    names = header.split(",")
    return next((each for each in _KNOWN if set(each[:3]).issubset(names)), None)


def read_lengths(lines: Sequence[str], columns: Columns, name: str) -> list[Row]:
    """The rows of the file `name`, in its order, without those that have no prompt or no answer, since such requests
    failed. Raises RunError naming the line of the first malformed row."""
    ids = count()
    return [
        Row(seconds * 1000, prompt, answer, tuple(islice(ids, -(-prompt // BLOCK_TOKENS))))
        for seconds, prompt, answer in _read(lines, columns, name)
        if prompt and answer
    ]


def _read(lines: Sequence[str], columns: Columns, name: str) -> Iterator[tuple[float, int, int]]:
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            seconds = columns.seconds(row[columns.time])
            prompt, answer = int(row[columns.prompt]), int(row[columns.answer])
            sound = min(prompt, answer) >= 0 and math.isfinite(seconds)
        except (TypeError, ValueError):  # TypeError: a field is missing
            sound = False
        if not sound:
            needed = f"{columns.time} must be a time, {columns.prompt} and {columns.answer} whole numbers from 0 on"
            raise RunError(f"{name}:{reader.line_num}: not a trace row: {needed}")
        yield seconds, prompt, answer
