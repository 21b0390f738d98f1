"""What is logged, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from router.settings.options import about

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class Logs:
    log_level: Annotated[LogLevel, about("Logs", "Lowest severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, about("Logs", "text for people; json for one JSON object per line.")] = "text"
