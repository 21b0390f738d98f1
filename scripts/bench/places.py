"""Where the benchmark keeps what is no part of the repository: the peers' environment, a tokenizer, logs."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kv-router-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
