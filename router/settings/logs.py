"""What is logged, and how; and where spans go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from publishers.urls import split_url
from router.settings.options import about, read_none

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def _read_endpoint(value: object) -> object:
    if not isinstance(value, str) or value == "none":
        return read_none(value)
    parts = split_url(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{value!r} is no URL; give one such as http://localhost:4318/v1/traces.")
    if parts.path.strip("/") == "":
        raise ValueError(f"{value!r} has no path; collectors take spans at {value.rstrip('/')}/v1/traces.")
    return value


@dataclass(frozen=True, kw_only=True)
class Logs:
    log_level: Annotated[LogLevel, about("Logs", "Lowest severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, about("Logs", "text for people; json for one JSON object per line.")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "Logs",
            "Send a trace of each request to this OpenTelemetry collector (OTLP over HTTP); needs the extra otel.",
            "URL",
            takes="a URL such as http://localhost:4318/v1/traces, or none",
            read=_read_endpoint,
        ),
    ] = None
