"""Whether and where spans are sent. OpenTelemetry is loaded only where they are."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from router.settings import SettingsError

if TYPE_CHECKING:
    from router.tracing.telemetry import Telemetry

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_tracing(endpoint: str | None) -> None:
    """SettingsError when spans are wanted that cannot be sent."""
    if endpoint and not all(_is_installed(package) for package in _NEEDED):
        raise SettingsError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'kv-aware-router[otel]'")


def make_telemetry(endpoint: str | None, version: str) -> Telemetry | None:
    """`version`: the router's."""
    if endpoint is None:
        return None
    from router.tracing.telemetry import Telemetry  # noqa: PLC0415 -- an extra

    return Telemetry(endpoint, version)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
