"""Logs for people (text) or machines (JSON lines): a constant message with its particulars as fields.

What an engine was asked is never logged: no token ids, no payloads; ids, counts, names and reasons.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import TextIO

_NOISY = ("aiohttp", "asyncio", "nats")


def log_event(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """`log_event(logger, logging.INFO, "Connected", server=url)`; the fields are in the record's `fields`."""
    logger.log(level, message, extra={"fields": fields}, stacklevel=2)


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Replaces the root logger's handlers. `log_format` is `text` or `json`; the default stream is stderr."""
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(_JsonLines() if log_format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())
    for name in _NOISY:  # they say at INFO what is of interest only when looking for a fault
        logging.getLogger(name).setLevel(logging.NOTSET if root.level <= logging.DEBUG else logging.WARNING)


class _Text(logging.Formatter):
    """`time level logger message key=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname.lower():<7} {record.name} {record.getMessage()}"
        pairs = (f"{key}={_quoted(value)}" for key, value in getattr(record, "fields", {}).items())
        trace = [self.formatException(record.exc_info)] if record.exc_info else []
        return "\n".join([" ".join([head, *pairs]), *trace])


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = dict(getattr(record, "fields", {}))
        entry |= {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: object) -> str:
    """As JSON text wherever a value might be taken for something else, or forge a line."""
    text = str(value)
    return text if text and text.isprintable() and not any(c in ' "=' for c in text) else json.dumps(text)
