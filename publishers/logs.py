"""Logs for people (text) or machines (JSON lines), on the standard library alone.

What a request asks and what a model answers is never logged: pass ids, counts, names and durations.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import sys
from collections.abc import Mapping
from typing import Final, TextIO

from publishers.log_stream import LogStream

_NOISY = ("aiohttp", "asyncio", "nats")
_NEVER_OF_USE = "numba"
"""Its debug lines are thousands for each function that it compiles."""
_QUIET: Final = 60.0
"""Seconds after a line of `Seldom` before its next."""


def configure_logging(
    level: str = "info",
    log_format: str = "text",
    stream: TextIO | None = None,
    every: Mapping[str, object] | None = None,
) -> None:
    """Replaces the root logger's handlers; `level` and `log_format` are those of `Settings`. Default stream: stderr.
    `every`: fields of each line."""
    output = LogStream(stream or sys.stderr)
    output.setFormatter(JsonFormatter(every) if log_format == "json" else TextFormatter(every))
    logging.getLogger().handlers[:] = [output]
    set_level(level)


def show_fields() -> None:
    """In another program's process: where it has no place for our lines, Python writes them without their fields."""
    ours = logging.getLogger("publishers")
    if not ours.hasHandlers():
        output = LogStream(sys.stderr)
        output.setFormatter(TextFormatter())
        ours.addHandler(output)


def set_level(level: str) -> None:
    """As in `configure_logging`."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in _NOISY:  # their info lines tell of every request or connection
        logging.getLogger(name).setLevel(
            max(logging.WARNING, root.level) if root.level > logging.DEBUG else logging.NOTSET
        )
    logging.getLogger(_NEVER_OF_USE).setLevel(max(logging.WARNING, root.level))


def get_level() -> str:
    """As in `configure_logging`."""
    return logging.getLevelName(logging.getLogger().level).lower()


def log_event(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """A constant message with its particulars as fields: `log_event(log, logging.INFO, "Worker added", worker=w)`."""
    logger.log(level, message, extra={"fields": fields}, stacklevel=2)


class Seldom:
    """Says when to log what lasts, or what anybody can cause as often as they like: once a minute at most."""

    def __init__(self) -> None:
        self._quiet_until = -math.inf

    def may(self, now: float) -> bool:
        """`now`: seconds on a steady clock."""
        return now >= self._quiet_until

    def said(self, now: float) -> None:
        self._quiet_until = now + _QUIET


class _Formatter(logging.Formatter):
    def __init__(self, every: Mapping[str, object] | None = None) -> None:
        """`every`: fields of each line."""
        super().__init__()
        self._every = every or {}

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        fields = getattr(record, "fields", None)
        return {**self._every, **(fields if isinstance(fields, Mapping) else {})}


class TextFormatter(_Formatter):
    """`time level logger message key=value …`; values with blanks or quotes are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname.lower():<7} {record.name} {_one_line(record.getMessage())}"
        pairs = (f"{key}={_quoted(value)}" for key, value in self._fields(record).items())
        return "\n".join([" ".join([head, *pairs]), *self._trace(record)])

    def _trace(self, record: logging.LogRecord) -> list[str]:
        return [self.formatException(record.exc_info)] if record.exc_info else []


class JsonFormatter(_Formatter):
    """One object per line: time, level, logger, message, the fields, and `exception` when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A rank is a pair to json, and in text, as in all lists of ranks, "w#0".
        fields = {key: str(value) if isinstance(value, tuple) else value for key, value in self._fields(record).items()}
        # A field never hides what every line has.
        entry = {**entry, **fields, **entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _as_json(entry)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """A line break in a value must not let it forge a log line, nor may it give orders to a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _as_json(value: object) -> str:
    """JSON escapes some of what is not printable, and all of it with the rest that is not ASCII."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, default=str)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else _as_json(text)
