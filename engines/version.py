"""What `--version` of each program says."""

from __future__ import annotations

import importlib.metadata


def version_of(program: str) -> str:
    try:
        version = importlib.metadata.version("kv-aware-router")
    except importlib.metadata.PackageNotFoundError:
        version = "(run from a checkout, not installed)"
    return f"{program} {version}"
